"""The benchmark room: measures every build of every node, remembers, judges and shows."""
