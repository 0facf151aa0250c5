//! Nothing: what this package has is a test program of `iopt`, `interleavings`.
//!
//! It tries millions of orders, so that optimizing it pays; for all others of the workspace that takes longer
//! than running them without. A profile is chosen for a package, so it has one of its own. The checker's threads are
//! coroutines with 32 KiB of stack, which the engine overflows without optimization.
