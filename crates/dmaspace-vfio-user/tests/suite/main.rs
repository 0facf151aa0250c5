//! The server over a socket: what a well-behaved client finds, and what one that is none can do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod engine;
mod events;
mod hostile;
mod memory;
mod migration;
mod peer;
mod requests;
mod threads;
