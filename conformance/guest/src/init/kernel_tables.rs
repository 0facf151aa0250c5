//! Tables of a device as the kernel shows them in debugfs, read by `dmaspace tables`: each address leads to the
//! frame that this process has there, and nothing else is mapped.
//!
//! Source: Linux, `Documentation/ABI/testing/debugfs-intel-iommu`.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use guest::{
    machines::{EDU, Machine, Unit},
    start,
};
use hostmem::{Backing, Mapping};
use iopt::Prot;
use serde_json::{Value, json};

use crate::{
    dma::{self, IOVA},
    edu::BUFFER,
    pci::Device,
    program::report,
    space::{Iommufd, Type1},
};

/// Bytes in huge pages.
const HUGE: u64 = 4 << 20;
/// Bytes in small pages behind them, which devices may only read.
const SMALL: u64 = 64 << 10;

/// The file with VT-d's tables of a device.
pub(crate) fn file(device: Device) -> PathBuf {
    Path::new("/sys/kernel/debug/iommu/intel")
        .join(device.0)
        .join("domain_translation_struct")
}

pub(crate) fn shown(_: &Machine) -> anyhow::Result<()> {
    are_read(&file(Device(EDU)), "vtd-ss")
}

/// The same by an image of all tables, of any format, where the kernel has our patch (`linux/patches/table-image.c`).
pub(crate) fn imaged(machine: &Machine) -> anyhow::Result<()> {
    let image = Path::new("/sys/kernel/debug/iommu/tables").join(EDU);
    if !start::patched("table-image")? {
        ensure!(!image.exists(), "{} is there", image.display());
        return Ok(());
    }
    let format = match machine.unit {
        Unit::Amd => "amdv1",
        Unit::IntelFirst => "x86-64",
        _ => "vtd-ss",
    };
    are_read(&image, format)
}

fn are_read(file: &Path, format: &str) -> anyhow::Result<()> {
    let (mut space, edu) = dma::open::<Type1>()?;
    let file = file.to_str().context("a strange path")?;
    let [huge, small] = [(Backing::Hugetlb2M, HUGE), (Backing::Anon4K, SMALL)]
        .map(|(backing, len)| dma::memory(backing, len));
    let (huge, small) = (huge?, small?);
    space.map_host(IOVA, &huge, Prot::RW)?;
    space.map_host(IOVA + HUGE, &small, Prot::READ)?;
    edu.read(IOVA, BUFFER)?;
    edu.write(IOVA + HUGE / 2, BUFFER)?;

    let dump = report(&["tables", "dump", file])?;
    ensure!(dump["root"]["format"] == format, "{}", dump["root"]);
    ensure!(dump["mapped_bytes"] == HUGE + SMALL, "{dump}");
    // AMD's tables map pages that happen to lie beside each other by one leaf.
    let leaves = dump["leaves"].as_array().context("no leaves")?;
    let bytes = |huge: bool| {
        let of = leaves
            .iter()
            .filter(|leaf| (leaf["page_bytes"].as_u64() >= Some(2 << 20)) == huge);
        of.filter_map(|leaf| leaf["bytes"].as_u64()).sum::<u64>()
    };
    ensure!([bytes(true), bytes(false)] == [HUGE, SMALL], "{leaves:?}");
    // Exit status 1 would be an error here: nothing is wrong.
    report(&["tables", "check", file])?;

    let walk = |iova: u64| report(&["tables", "walk", file, &iova.to_string()]);
    for (memory, base, write) in [(&huge, IOVA, true), (&small, IOVA + HUGE, false)] {
        for offset in [0, 0x1234, memory.len() / 2, memory.len() - 1] {
            let walk = walk(base + offset)?;
            let expected = json!(format!("{:#x}", address(memory, offset)?));
            ensure!(walk["read"]["pa"] == expected, "{walk}, not {expected}");
            let writes = if write { "translated" } else { "faults" };
            ensure!(walk["write"]["outcome"] == writes, "{walk}");
        }
    }
    for hole in [IOVA - 1, IOVA + HUGE + SMALL] {
        let walk = walk(hole)?;
        ensure!(walk["read"]["outcome"] == "faults", "{walk}");
    }
    // When it is unmapped, nothing is left of it.
    let whole = runs::Span::new(IOVA, HUGE + SMALL);
    let unmapped = space.unmap(whole)?;
    ensure!(unmapped == whole.len, "{unmapped:#x} bytes");
    let empty = report(&["tables", "dump", file])?;
    ensure!(empty["leaves"] == Value::Array(vec![]), "{empty}");
    Ok(())
}

/// The physical address of a byte.
///
/// Source: Linux, `Documentation/admin-guide/mm/pagemap.rst`.
fn address(memory: &Arc<Mapping>, offset: u64) -> anyhow::Result<u64> {
    let at = memory.address() + offset;
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, at / 4096 * 8)?;
    let entry = u64::from_ne_bytes(entry);
    ensure!(entry >> 63 == 1, "no page at {at:#x}");
    Ok((entry & ((1 << 55) - 1)) * 4096 + at % 4096)
}

/// Pages that the kernel has for I/O page tables.
pub(crate) fn pages() -> anyhow::Result<u64> {
    // Counts of the processors are added up.
    fs::write("/proc/sys/vm/stat_refresh", "1")?;
    let text = fs::read_to_string("/proc/vmstat")?;
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("nr_iommu_pages "));
    Ok(count.context("no count of pages")?.parse()?)
}

/// Counts of our tables in the kernel: maps, and unmaps that returned runs.
const COUNTS: &str = "/sys/module/dmaspace_tables/parameters";

fn count(name: &str) -> anyhow::Result<u64> {
    let path = Path::new(COUNTS).join(name);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(text.trim().parse()?)
}

/// Calls `what`, and looks whether it has unmapped by runs where the unit has our tables, and the kernel the patch for that.
pub(crate) fn unmapping_runs<T>(
    machine: &Machine,
    what: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let other = matches!(machine.unit, Unit::Virtio | Unit::Smmu1 | Unit::Smmu2);
    if other || !start::patched("unmap-runs")? || !start::has_our_tables()? {
        return what();
    }
    let before = count("unmaps")?;
    let done = what()?;
    let after = count("unmaps")?;
    ensure!(after > before, "no unmap has returned runs: {after}");
    Ok(done)
}

/// A device copies memory through tables of the kernel, and they are those that the host has named: ours count.
pub(crate) fn named(_: &Machine) -> anyhow::Result<()> {
    if !start::has_our_tables()? {
        ensure!(!Path::new(COUNTS).exists(), "the kernel has tables of ours");
        return dma::copies::<Type1>(Backing::Anon4K);
    }
    for backing in [Backing::Anon4K, Backing::Hugetlb2M] {
        for copies in [dma::copies::<Type1>, dma::copies::<Iommufd>] {
            let before = count("maps")?;
            copies(backing)?;
            let after = count("maps")?;
            println!("maps by iopt: {before}, then {after}");
            ensure!(after > before, "no map was by tables of ours: {after}");
        }
    }
    Ok(())
}
