//! A device that finds its work in memory: one command is three accesses by DMA.

use anyhow::ensure;
use iopt::{Prot, walk::Access};
use qtest::nvme::{Error, Ring, Status};
use runs::Span;

use super::suite::{MIB, first, page};
use crate::{At, NVME, Rig, SERIAL, case::Case};

/// Commands, completions and data lie in three places. Then data may not be written, and at last the
/// commands are gone.
pub(super) fn nvme(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 13;
    let case = Case::new(rig)?;
    let mut table = case.table()?;
    let page = page(&table);
    let base = first(&case, &table) + 32 * MIB;
    let data = rig.data().start;
    // Not one of them follows another, for the device or in memory.
    let at = |nth: u64| At {
        iova: base + nth * 3 * page,
        address: data + (9 - nth) * MIB,
    };
    for nth in 0..8 {
        let prot = if nth == 7 { Prot::READ } else { Prot::RW };
        table.map(at(nth).iova, &[Span::new(at(nth).address, page)], prot)?;
    }
    case.attach(NVME, DOMAIN, &table)?;
    let ring = |nth| Ring {
        address: at(nth).address,
        device: at(nth).iova,
    };
    let mut nvme = rig.nvme(ring(0), ring(1))?;
    let serial = |nth: u64| -> anyhow::Result<bool> {
        let mut found = [0; SERIAL.len()];
        rig.machine().read(at(nth).address + 4, &mut found)?;
        Ok(found == *SERIAL)
    };
    // More than a round of the rings.
    for round in 0..70 {
        let nth = 2 + round % 5;
        rig.machine().memset(at(nth).address, 4096, 0xee)?;
        let status = nvme.identify(at(nth).iova)?;
        ensure!(status == Status::SUCCESS, "round {round}: {status:?}");
        ensure!(serial(nth)?, "round {round}: no serial number");
        rig.note([page; 3]);
    }
    rig.add_copies(70);
    // Read-only data, and a hole. QEMU's controller does not look whether its data has arrived, and
    // reports success (seen in 10.0.2).
    for (iova, denied) in [(at(7).iova, true), (at(7).iova + 3 * page, false)] {
        nvme.identify(iova)?;
        match denied {
            true => case.denied(NVME, iova, Access::Write, false)?,
            false => case.fault(NVME, iova, Access::Write)?,
        };
    }
    ensure!(!serial(7)?, "written to read-only memory");
    case.unmap(&mut table, Span::new(at(0).iova, page), DOMAIN)?;
    let lost = nvme.identify(at(2).iova);
    ensure!(matches!(lost, Err(Error::Fatal { .. })), "{lost:?}");
    case.fault(NVME, at(0).iova, Access::Read)?;
    case.detach(NVME)?;
    case.end()
}
