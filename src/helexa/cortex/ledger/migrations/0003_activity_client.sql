-- IP address of the client of a request.
ALTER TABLE activity ADD COLUMN client TEXT;
