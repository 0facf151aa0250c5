//! I/O page tables in hardware formats: one engine, every format, walkers.
