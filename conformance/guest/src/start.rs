//! Work of each first process of a guest: file systems, results, the end.

use std::{
    fmt::Display,
    fs::{self, File, OpenOptions},
    io::Write as _,
    process::ExitCode,
};

use anyhow::Context as _;
use rustix::{
    mount::{self, MountFlags},
    system::{self, RebootCommand},
};

/// The serial port that takes the results.
pub const RESULTS: &str = match cfg!(target_arch = "aarch64") {
    true => "/dev/ttyAMA1",
    false => "/dev/ttyS1",
};

/// Mounts the file systems of the kernel.
///
/// # Errors
///
/// When one cannot be mounted.
pub fn mount() -> anyhow::Result<()> {
    for (kind, place) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("debugfs", "/sys/kernel/debug"),
    ] {
        mount::mount(kind, place, kind, MountFlags::empty(), None)
            .with_context(|| format!("{place} cannot be mounted"))?;
    }
    Ok(())
}

/// The value of `name` among the kernel's `words`.
pub fn word<'a>(words: &'a str, name: &str) -> Option<&'a str> {
    let mut words = words.split_whitespace();
    words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// True if the host says that the kernel has I/O page tables of ours.
///
/// # Errors
///
/// When the kernel's words cannot be read.
pub fn has_our_tables() -> anyhow::Result<bool> {
    let words = fs::read_to_string("/proc/cmdline")?;
    Ok(word(&words, "dmaspace.tables") == Some("iopt"))
}

/// True if the host says that a patch of this name is in the kernel.
///
/// # Errors
///
/// When the kernel's words cannot be read.
pub fn patched(patch: &str) -> anyhow::Result<bool> {
    let words = fs::read_to_string("/proc/cmdline")?;
    let patches = word(&words, "dmaspace.patches").unwrap_or_default();
    Ok(patches.split(',').any(|name| name == patch))
}

/// Opens the port of the results.
///
/// # Errors
///
/// When it cannot be opened.
pub fn results() -> anyhow::Result<File> {
    let port = OpenOptions::new().write(true).open(RESULTS);
    port.context(RESULTS)
}

/// Says a line on the port of the results, and on the console, where it stands between the kernel's messages.
///
/// # Errors
///
/// When it cannot be written.
pub fn say(results: &mut File, line: &impl Display) -> anyhow::Result<()> {
    println!("init: {line}");
    writeln!(results, "{line}")?;
    // The power goes off faster than a serial port sends.
    rustix::termios::tcdrain(results)?;
    Ok(())
}

/// Ends the machine. Returns only when it fails; then the first process ends, and the kernel panics.
pub fn power_off() -> ExitCode {
    if let Err(error) = system::reboot(RebootCommand::PowerOff) {
        println!("init: no power off: {error}");
    }
    ExitCode::FAILURE
}
