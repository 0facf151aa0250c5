//! A live unit changes hands, with a device at work all the time.

use anyhow::{Context as _, ensure};
use ioas::HostTables;
use iommu::{Frozen, UnitMemory};
use std::sync::Arc;

use iopt::{AnyTable, Cell as _, Chain, Prot, TableMemory as _, Takeover};
use runs::Span;

use super::suite::{MIB, first, page};
use crate::{At, Rig, Seen, case::Case, id, tables::Tables};

/// After each access to a register, from freezing on until the successor has flushed, a copy arrives. The
/// successor has the memory mapped at another place, and knows nothing but the description and what was
/// listed.
pub(super) fn handover(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 8;
    let data = rig.data().start;
    let (base, page) = {
        let case = Case::new(rig)?;
        let table = case.table()?;
        let place = (first(&case, &table), page(&table));
        case.end()?;
        place
    };
    let at = |nth: u64| At {
        iova: base + nth * page,
        address: data + nth * page,
    };
    // That driver has kept its memory.
    let before = rig.structures().in_use();
    let busy = rig.busy_registers(at(0), at(1));
    let case = Case::over(rig, &busy)?;
    let table = case.table()?;
    table.map(base, &[Span::new(data, 4 * page)], Prot::RW)?;
    case.attach(0, DOMAIN, &table)?;
    case.copy_by(&table, 0, at(2), at(3))?;

    busy.begin();
    let (mut structures, mut roots) = (Vec::new(), Vec::new());
    let frozen = case.into_driver().freeze(&mut |held| match held {
        UnitMemory::Structure { span, .. } => structures.push(span),
        UnitMemory::Table { root, .. } => roots.push(root),
    })?;
    ensure!(roots == [table.root()], "{roots:x?}");
    let sizes = table.page_sizes();
    let listed: u64 = structures.iter().map(|span| span.len / 4096).sum();
    let used = rig.structures().in_use() - before;
    ensure!(
        listed + table.tables_of_4k() == used,
        "{structures:?} and {} tables, but {used} pages in use",
        table.tables_of_4k()
    );
    let bytes = frozen.to_bytes();

    // The successor.
    let frozen = Frozen::from_bytes(&bytes)?;
    let mut takeover = Takeover::new(rig.structures_again()?, rig.structures_at().start)?;
    for span in structures {
        takeover.keep(span)?;
    }
    // Larger tables lie in memory of their own.
    let of_4k = table.is_of_4k();
    let adopted = of_4k.then(|| AnyTable::adopt(&mut takeover, roots[0], sizes));
    let adopted = adopted.transpose()?;
    let memory: Arc<HostTables> = Arc::new(takeover.finish());
    // It may do with all other pages what it likes.
    let mut others = Chain::empty();
    while let Ok(page) = memory.allocate(4096) {
        memory
            .entries(page, 512)
            .iter()
            .for_each(|cell| cell.set(u64::MAX));
        others.push(&memory, page);
    }
    memory.reclaim(others);
    let driver = rig.driver(&busy, &memory, Some(&frozen))?;
    let case = Case::adopted(rig, driver);
    let mut table = match adopted {
        Some(adopted) => Tables::in_structures(adopted.open(Arc::clone(&memory))?),
        None => table,
    };
    // It finds the device, maps, unmaps and flushes.
    let again = case.attach(0, DOMAIN, &table);
    ensure!(again.is_err(), "attached a second time");
    let more = base + 8 * MIB;
    table.map(more, &[Span::new(data + 8 * MIB, 2 * page)], Prot::RW)?;
    let new = At {
        iova: more,
        address: data + 8 * MIB,
    };
    case.copy_by(&table, 0, at(2), new)?;
    case.unmap(&mut table, Span::new(more, 2 * page), DOMAIN)?;
    case.copy(0, at(2), new, Seen::Untouched)?;
    let copies = busy.end()?;
    // How many depends on how often the driver has looked: they are not counted.
    ensure!(
        copies >= 8,
        "{copies} copies only while the unit changed hands"
    );
    case.faults();
    case.detach(0).context("the successor")?;
    ensure!(case.driver().detach(id(0)).is_err());
    case.end()
}
