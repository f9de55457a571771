"""The RDMA guest (rung 5): small virtual machines with Debian's kernel and its soft-RoCE driver."""
