//! I/O address spaces: areas, ledger, domains.
