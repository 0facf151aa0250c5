//! Device memory for virtual machines, hypervisors and user-space drivers.
