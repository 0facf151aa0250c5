//! Rigs against code that others wrote.
//!
//! The compare test: Linux's I/O page-table code, compiled at test time from Debian's source
//! package as a program of its own ([`source`], [`build`]), gets the same operations as ours
//! ([`drive`]) and answers with the bytes of its tables ([`server`]), which are compared with ours
//! ([`compare`]). Where the two are meant to differ, [`differences`] says so, and why. Nothing of
//! Linux is stored, copied or linked into this crate.
//!
//! The same program, built without Linux's checks of itself, times work of its tables in its own
//! process ([`timing`]), to be compared with ours.
//!
//! For the other rigs there are kernels ([`kernel`]) with a record of what they were built of ([`inputs`]), packages of Debian ([`apt`]), a QEMU of a later release
//! ([`newer_qemu`]), the oldest Rust compiler that is supported ([`oldest_rustc`]), QEMU's monitor ([`qmp`]), and what a
//! guest finds when it boots ([`initramfs`]).

pub mod apt;
pub mod build;
pub mod compare;
pub mod differences;
pub mod drive;
pub mod initramfs;
pub mod inputs;
pub mod kernel;
pub mod newer_qemu;
pub mod oldest_rustc;
pub mod patch;
pub mod qmp;
pub mod server;
pub mod setup;
pub mod source;
pub mod timing;
