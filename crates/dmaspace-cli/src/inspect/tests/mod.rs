//! What `dmaspace inspect` says of machines that are made up.

mod findings;
