//! What `dmaspace map` does.

mod job;
