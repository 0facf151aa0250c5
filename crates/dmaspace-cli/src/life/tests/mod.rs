//! What `dmaspace life` does.

mod job;
