"""Model endpoints: one file per wire API behind one port."""
