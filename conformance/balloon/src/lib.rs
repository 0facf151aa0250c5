//! A stock Linux guest with its own balloon driver, and our device on the other side.
//!
//! The guest ([`guest`]) is a machine of QEMU, or User-Mode Linux: a Linux kernel that is a program, which boots in a
//! few seconds and attaches a vhost-user device. It gets a one-file initramfs of
//! busybox, the kernel's own `virtio_balloon.ko` and a script, `init.sh`, which runs commands.
//! The device is the program `dmaspace balloon` ([`daemon`]), QEMU's ([`mod@qemu`]), one that is hostile ([`hostile`]), or,
//! to compare with, one that gives memory back page by page ([`page_by_page`]). [`checks`] are asked of both sides together,
//! and [`mod@bench`] times them. Every wait has an end.

#![forbid(unsafe_code)]

pub mod bench;
pub mod checks;
pub mod daemon;
pub mod guest;
pub mod hostile;
pub mod page_by_page;
pub mod qemu;
mod registers;
