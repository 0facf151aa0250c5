//! `dmaspace map` with the software unit, on this kernel's memory.

use std::process::Command;

use anyhow::{Context as _, ensure};
use guest::machines::Machine;
use serde_json::Value;

/// Bytes that are mapped.
const SIZE: u64 = 32 << 20;

pub(crate) fn small_pages(_: &Machine) -> anyhow::Result<()> {
    map("4k", 0)
}

pub(crate) fn transparent_huge_pages(_: &Machine) -> anyhow::Result<()> {
    map("thp", SIZE)
}

pub(crate) fn huge_pages(_: &Machine) -> anyhow::Result<()> {
    map("hugetlb-2m", SIZE)
}

/// Runs it, and looks whether `huge` bytes lie in huge pages, all was read and written, and nothing
/// was wrong.
fn map(backing: &str, huge: u64) -> anyhow::Result<()> {
    let size = SIZE.to_string();
    let output = Command::new("/bin/dmaspace")
        .args(["map", "--json", "--size", &size, "--backing", backing])
        .output()
        .context("dmaspace cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        said.trim()
    );
    let report: Value = serde_json::from_slice(&output.stdout).context("no report")?;
    for (what, expected) in [
        ("/memory/size_bytes", SIZE),
        ("/memory/huge_bytes", huge),
        ("/charge/charged_bytes", SIZE),
        ("/dma/written_bytes", SIZE),
        ("/dma/wrong_bytes", 0),
        ("/dma/faults", 0),
    ] {
        let found = report.pointer(what).and_then(Value::as_u64);
        ensure!(
            found == Some(expected),
            "{what} is {found:?}, not {expected}"
        );
    }
    for (what, expected) in [
        ("/memory/backing", backing),
        // Real frames: this is root.
        ("/memory/addresses", "pagemap"),
        ("/charge/pin", "io_uring"),
    ] {
        let found = report.pointer(what).and_then(Value::as_str);
        ensure!(
            found == Some(expected),
            "{what} is {found:?}, not {expected}"
        );
    }
    Ok(())
}
