//! What `dmaspace numa` plans and measures on machines that are made up.

mod measure;
mod plan;
