//! Plans of `dmaspace numa` on machines that are made up.

mod plan;
