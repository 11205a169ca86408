"""Host groups: several hosts compute a model, one stage of layers per host.

Host 0 runs the node's server and schedules. The other hosts are members: they register with host 0, and start a stage
process for each model that host 0 loads.
"""
