"""Host groups: several hosts that compute models together, one stage of the model's layers per host.

Host 0 runs the node's server and schedules. The other hosts are members: they register with host 0, and start a stage
process for each model that host 0 loads.
"""
