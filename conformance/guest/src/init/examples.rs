//! The examples that want a device, run as their readers run them.

use std::process::Command;

use anyhow::{Context as _, ensure};
use guest::machines::{DISK_BLOCKS, EDU, NVME, NVME_SERIAL, disk_block};

use crate::pci::Device;

/// `examples/nvme.rs` by one of its ways: the controller identifies itself by DMA to the address given, and
/// reads the blocks that the machine began with.
pub(crate) fn nvme(way: &str) -> anyhow::Result<()> {
    Device(NVME).bind_to_vfio()?;
    for block in [0, 5, DISK_BLOCKS - 1] {
        let said = run("/bin/nvme", &[NVME, way, &block.to_string()])?;
        let mut lines = said.lines();
        let serial = lines.next().and_then(|line| line.strip_prefix("serial "));
        ensure!(serial == Some(NVME_SERIAL), "its serial is {serial:?}");
        let model = lines.next().and_then(|line| line.strip_prefix("model "));
        ensure!(
            model.is_some_and(|model| model.contains("QEMU")),
            "it is {model:?}"
        );
        let title = format!("block {block} of 512 bytes");
        ensure!(lines.next() == Some(&title), "no {title}: {said}");
        let expected: Vec<String> = disk_block(block)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let found: String = lines.collect();
        ensure!(found == expected.concat(), "block {block} is {found}");
    }
    let refused = run("/bin/nvme", &[NVME, way, &DISK_BLOCKS.to_string()]);
    let why = refused
        .err()
        .context("a block beyond the last")?
        .to_string();
    ensure!(why.contains("it has 2048 blocks"), "{why}");
    Ok(())
}

/// `examples/vmm.rs` over iommufd: to its end, at which it has looked at every count.
pub(crate) fn monitor() -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let said = run("/bin/vmm", &[EDU])?;
    for line in [
        "the kernel cannot unmap a part of a mapping",
        "  the host has 1 MiB back",
        "everything was given back",
    ] {
        ensure!(
            said.lines().any(|said| said == line),
            "no \"{line}\": {said}"
        );
    }
    Ok(())
}

/// `examples/vfio_ioctls.rs`: the kernel has locked what the crate's container has mapped, and takes it back.
pub(crate) fn vfio_ioctls() -> anyhow::Result<()> {
    Device(EDU).bind_to_vfio()?;
    let said = run("/bin/vfio_ioctls", &[EDU])?;
    ensure!(said == "charged 2097152, locked 2097152\n", "{said}");
    Ok(())
}

/// Output of the program; an error has its complaint.
fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .context("it cannot be started")?;
    let (said, wrong) = (
        String::from_utf8(output.stdout)?,
        String::from_utf8_lossy(&output.stderr),
    );
    ensure!(output.status.success(), "{}: {wrong}{said}", output.status);
    Ok(said)
}
