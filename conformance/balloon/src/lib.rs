//! A stock Linux guest with its own balloon driver, and our device on the other side.
//!
//! The guest is Debian's User-Mode Linux ([`guest`]): a Linux kernel that is a program, boots in a few
//! seconds without any privilege, and attaches a vhost-user device. It gets a one-file initramfs of
//! busybox, the kernel's own `virtio_balloon.ko` and a script, `init.sh`, which does what it is told.
//! The device is the program `dmaspace balloon` ([`daemon`]), or, to compare with, one that gives memory
//! back page by page ([`page_by_page`]). [`checks`] are what is asked of both together, and [`mod@bench`]
//! times them. Every wait has an end.

#![forbid(unsafe_code)]

pub mod bench;
pub mod checks;
pub mod daemon;
pub mod guest;
pub mod hostile;
pub mod page_by_page;
pub mod qemu;
mod registers;
