//! Checks of every unit and every table that it walks.
//!
//! Sizes and places follow from the table: its smallest leaf is called a page, and the addresses that it
//! translates are one stretch or, where they are sign-extended, two.

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use iopt::{Above, Gather, Prot, walk::Access};
use runs::{Pa, Span};

use crate::{At, LONGEST, Rig, Seen, case::Case, id, tables::Tables};

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

/// The stretches of addresses that a unit translates through a table, each its first and last.
pub(super) fn stretches(case: &Case<'_>, table: &Tables) -> Vec<(u64, u64)> {
    let aperture = table.aperture();
    let bits = aperture.bits.min(case.driver().capabilities().input_bits);
    let below = |bits: u32| u64::MAX.checked_shr(64 - bits).unwrap_or(0);
    match aperture.above {
        Above::Zeros => vec![(0, below(bits))],
        Above::Ones => vec![(!below(bits), u64::MAX)],
        Above::Sign => vec![(0, below(bits - 1)), (!below(bits - 1), u64::MAX)],
    }
}

/// The first address that is translated.
pub(super) fn first(case: &Case<'_>, table: &Tables) -> u64 {
    stretches(case, table)
        .first()
        .map_or(0, |stretch| stretch.0)
}

/// Bytes of the smallest leaf, and of larger ones up to `most`, ascending.
pub(super) fn sizes(table: &Tables, most: u64) -> Vec<u64> {
    let sizes = table.page_sizes().iter();
    sizes.filter(|size| *size <= most).collect()
}

pub(super) fn page(table: &Tables) -> u64 {
    table.page_sizes().smallest()
}

/// True when a device's access there is no access to memory.
pub(super) fn reserved(case: &Case<'_>, iova: u64) -> bool {
    let mut found = false;
    let id = id(0);
    case.driver()
        .reserved(id, &mut |span| found |= span.contains(iova));
    found
}

/// Each size of leaf, at the lowest and the highest address of each stretch, reached at both of its ends.
pub(super) fn leaf_sizes(rig: &Rig) -> anyhow::Result<()> {
    let case = Case::new(rig)?;
    let data = rig.data();
    let end = data.start + data.len;
    for size in case.table()?.page_sizes().iter() {
        let table = case.table()?;
        let mut places = Vec::new();
        for (first, last) in stretches(&case, &table) {
            let top = last - (size - 1);
            for (nth, iova) in [first, top].into_iter().enumerate() {
                if !iova.is_multiple_of(size) || iova < first || (nth == 1 && top == first) {
                    continue;
                }
                // A leaf of which all is memory, or one that has all memory in it.
                let near = data.start.next_multiple_of(size.max(GIB)) + nth as u64 * size;
                let inside = near.checked_add(size).is_some_and(|behind| behind <= end);
                let (address, offsets) = match inside {
                    true => (near, [0, size - 4096]),
                    false if size >= end => (0, [data.start, end - 4096]),
                    false => (end - size, [0, size - 4096]),
                };
                ensure!(address.is_multiple_of(size), "{address:#x} for {size:#x}");
                table
                    .map(iova, &[Span::new(address, size)], Prot::RW)
                    .with_context(|| format!("a leaf of {size:#x} at {iova:#x}"))?;
                let leaf = table.leaf_at(iova).context("no leaf")?;
                ensure!(leaf.run.len == size, "{leaf:?} for {size:#x}");
                for offset in offsets {
                    let (iova, address) = (iova + offset, address + offset);
                    let there = |at: &At| at.iova == iova;
                    if !reserved(&case, iova) && !places.iter().any(there) {
                        places.push(At { iova, address });
                    }
                }
            }
        }
        case.attach(0, 5, &table)?;
        for (nth, from) in places.iter().enumerate() {
            let to = places[(nth + 1) % places.len()];
            // One leaf with all of memory may be the lowest and the highest.
            if from.address != to.address {
                case.copy_by(&table, 0, *from, to)?;
            }
        }
        case.detach(0)?;
    }
    case.end()
}

/// Memory at its own addresses, and pages that lie anywhere.
pub(super) fn identity_and_scattered(rig: &Rig) -> anyhow::Result<()> {
    const PAGES: u64 = 48;
    let case = Case::new(rig)?;
    let table = case.table()?;
    let (data, page) = (rig.data(), page(&table));
    let first = first(&case, &table);
    let mut random = Rng::with_seed(3 + rig.round());
    let slots = (data.len - 2 * GIB) / page;
    let runs: Vec<Span<Pa>> = (0..PAGES)
        .map(|nth| {
            // Each in a part of its own.
            let slot = nth * (slots / PAGES) + random.u64(..slots / PAGES);
            Span::new(
                (data.start + GIB).next_multiple_of(page) + slot * page,
                page,
            )
        })
        .collect();
    // One call for all.
    let base = first + 16 * MIB;
    table.map(base, &runs, Prot::RW)?;
    case.attach(0, 7, &table)?;
    let at = |nth: u64| At {
        iova: base + nth * page,
        address: runs[nth as usize].start,
    };
    for nth in 0..PAGES {
        case.copy_by(&table, 0, at(nth), at((nth * 5 + 1) % PAGES))?;
    }
    let identity = Span::new(data.start, GIB.min(data.len));
    let covered = |(first, last): (u64, u64)| first <= identity.start && identity.last() <= last;
    if stretches(&case, &table).into_iter().any(covered) {
        table.map(identity.start, &[identity], Prot::RW)?;
        let at = |offset| At {
            iova: identity.start + offset,
            address: identity.start + offset,
        };
        for _ in 0..8 {
            let [from, to] = [(); 2].map(|()| random.u64(..GIB / 8192 - 1) * 8192);
            case.copy_by(&table, 0, at(from), at(to + 4096))?;
        }
    }
    case.detach(0)?;
    case.end()
}

/// A range that devices may only read, one that they may only write.
pub(super) fn permissions(rig: &Rig) -> anyhow::Result<()> {
    let case = Case::new(rig)?;
    let table = case.table()?;
    let page = page(&table);
    let first = first(&case, &table) + 16 * MIB;
    let at = |nth: u64| At {
        iova: first + nth * page,
        address: rig.data().start + (nth + 64) * page,
    };
    let write_only = table.expresses(Prot::WRITE);
    for (nth, prot) in [
        (0, Prot::RW),
        (1, Prot::RW),
        (2, Prot::READ),
        (3, Prot::WRITE),
    ] {
        if prot != Prot::WRITE || write_only {
            table.map(at(nth).iova, &[Span::new(at(nth).address, page)], prot)?;
        }
    }
    case.attach(0, 4, &table)?;
    case.copy_by(&table, 0, at(0), at(1))?;
    // Once with a cold cache, once with a warm one.
    for warm in [false, true] {
        case.copy(0, at(0), at(2), Seen::Untouched)?;
        case.denied(0, at(2).iova, Access::Write, warm)?;
        case.copy_by(&table, 0, at(2), at(0))?;
        if write_only {
            case.not_copied(0, at(3), at(1))?;
            case.denied(0, at(3).iova, Access::Read, warm)?;
            case.copy_by(&table, 0, at(0), at(3))?;
        }
    }
    case.detach(0)?;
    case.end()
}

/// Unmapped addresses, and a copy that begins in a mapped page and ends behind it.
pub(super) fn holes(rig: &Rig) -> anyhow::Result<()> {
    let case = Case::new(rig)?;
    let table = case.table()?;
    let page = page(&table);
    let first = first(&case, &table) + 16 * MIB;
    let at = |nth: u64| At {
        iova: first + nth * page,
        address: rig.data().start + (nth + 64) * page,
    };
    for nth in [0, 2] {
        table.map(at(nth).iova, &[Span::new(at(nth).address, page)], Prot::RW)?;
    }
    case.attach(0, 4, &table)?;
    case.copy_by(&table, 0, at(0), at(2))?;
    for hole in [1, 3, 4] {
        case.copy(0, at(0), at(hole), Seen::Untouched)?;
        case.fault(0, at(hole).iova, Access::Write)?;
        case.not_copied(0, at(hole), at(2))?;
        case.fault(0, at(hole).iova, Access::Read)?;
    }
    // Half of it lies in the page, half behind: what is there stays.
    let before = rig.bytes(4096);
    for nth in [0, 2] {
        let behind = at(nth + 1).address;
        rig.machine().write(behind, &before)?;
        rig.dma(0, at(0).iova, at(nth + 1).iova - 2048, LONGEST)?;
        case.fault(0, at(nth + 1).iova, Access::Write)?;
        let mut found = vec![0; 4096];
        rig.machine().read(behind, &mut found)?;
        ensure!(found == before, "written behind {:x?}", at(nth));
    }
    // A device of which the unit knows nothing.
    case.copy(1, at(0), at(2), Seen::Untouched)?;
    let faults = case.faults();
    let theirs = faults.iter().all(|fault| fault.device == id(1));
    let told = !faults.is_empty() || !rig.unit().tells().strangers;
    ensure!(theirs && told, "{faults:?}");
    case.detach(0)?;
    case.end()
}

/// The same addresses lead each device elsewhere.
pub(super) fn two_domains(rig: &Rig) -> anyhow::Result<()> {
    let case = Case::new(rig)?;
    let mut tables = [case.table()?, case.table()?];
    let page = page(&tables[0]);
    let first = first(&case, &tables[0]);
    let data = rig.data().start;
    let memory = [data, data + MIB];
    for ((device, table), address) in tables.iter_mut().enumerate().zip(memory) {
        table.map(first, &[Span::new(address, 2 * page)], Prot::RW)?;
        case.attach(device, device as u32 + 1, table)?;
    }
    let at = |device: usize, offset| At {
        iova: first + offset,
        address: memory[device] + offset,
    };
    for device in [0, 1, 0, 1] {
        case.copy_by(&tables[device], device, at(device, 0), at(device, page))?;
        let other = at(1 - device, page);
        case.copy(device, at(device, 0), other, Seen::Untouched)?;
    }
    // One goes, the other stays.
    case.detach(0)?;
    case.copy(0, at(0, 0), at(0, page), Seen::Untouched)?;
    case.faults();
    case.copy_by(&tables[1], 1, at(1, 0), at(1, page))?;
    // It comes back to the other's table, and both see the same.
    case.attach(0, 2, &tables[1])?;
    case.copy_by(&tables[1], 0, at(1, 0), at(1, page))?;
    case.detach(1)?;
    case.copy_by(&tables[1], 0, at(1, 0), at(1, page))?;
    case.detach(0)?;
    case.end()
}

/// A translation goes on after its leaf is gone, until a flush.
pub(super) fn stale(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 3;
    let case = Case::new(rig)?;
    let mut table = case.table()?;
    let (page, data) = (page(&table), rig.data().start);
    let base = first(&case, &table);
    case.attach(0, DOMAIN, &table)?;
    for size in sizes(&table, 512 * MIB) {
        let source = At {
            iova: base,
            address: data,
        };
        let target = At {
            iova: base + size,
            address: data.next_multiple_of(GIB) + size,
        };
        let copy = |seen| case.copy(0, source, target, seen);
        table.map(source.iova, &[Span::new(source.address, page)], Prot::RW)?;
        table.map(target.iova, &[Span::new(target.address, size)], Prot::RW)?;
        case.copy_by(&table, 0, source, target)?;
        let mut gather = Gather::new();
        table.unmap(Span::new(target.iova, size), &mut gather)?;
        if rig.unit().tells().caches {
            copy(Seen::Copied).context("unmapped, not yet invalidated")?;
        }
        case.flush(&mut table, &mut gather, DOMAIN)?;
        copy(Seen::Untouched).context("invalidated")?;
        case.fault(0, target.iova, Access::Write)?;
        case.unmap(&mut table, Span::new(source.iova, page), DOMAIN)?;
    }
    case.detach(0)?;
    case.end()
}

/// A leaf that was reached at both ends is invalidated at both, while another is left in its table.
pub(super) fn stale_at_both_ends(rig: &Rig) -> anyhow::Result<()> {
    const DOMAIN: u32 = 3;
    let case = Case::new(rig)?;
    let mut table = case.table()?;
    let (page, data) = (page(&table), rig.data().start);
    let base = first(&case, &table);
    case.attach(0, DOMAIN, &table)?;
    for size in sizes(&table, 64 * MIB) {
        let at = |iova, offset| At {
            iova: base + iova,
            address: data.next_multiple_of(GIB) + iova + offset,
        };
        let (source, leaf, other) = (at(0, 0), at(2 * size, GIB), at(3 * size, GIB));
        for (at, len) in [(source, page), (leaf, size), (other, size)] {
            table.map(at.iova, &[Span::new(at.address, len)], Prot::RW)?;
        }
        let ends = [leaf.plus(size - page), leaf];
        for end in ends {
            case.copy_by(&table, 0, source, end)?;
        }
        let mut gather = Gather::new();
        table.unmap(Span::new(leaf.iova, size), &mut gather)?;
        case.flush(&mut table, &mut gather, DOMAIN)?;
        for end in ends {
            case.copy(0, source, end, Seen::Untouched)?;
            case.fault(0, end.iova, Access::Write)?;
        }
        case.copy_by(&table, 0, source, other)?;
        for (at, len) in [(source, page), (other, size)] {
            case.unmap(&mut table, Span::new(at.iova, len), DOMAIN)?;
        }
    }
    case.detach(0)?;
    case.end()
}
