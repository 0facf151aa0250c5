//! Tables in files: listed, checked, explained, compared; and files of any bytes.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod explain;
mod fields;
mod hostile;
mod images;
mod kernel;
mod survey;
