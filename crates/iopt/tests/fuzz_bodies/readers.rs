//! The engine's readers over tables in which anything may stand.

use iopt::{Above, Aperture, Cell, Format, Leaf, Prot, Table, TableOps as _};
use runs::Span;

use super::Bytes;
use super::formats::{self, Do, Room};

/// Leaves that are looked at in one range: damaged tables may have very many.
const ENOUGH: usize = 3000;

pub(super) fn readers(data: &[u8]) {
    formats::any(Read, &mut Bytes(data));
}

struct Read;

impl Do for Read {
    fn with<F: Format, M: Room>(self, format: F, data: &mut Bytes<'_>) {
        let base = 1 << (format.output_bits() - 1).min(46);
        let memory = M::at(base);
        let Ok(mut table) = Table::new(format, &memory) else {
            return;
        };
        let aperture = format.aperture();
        let tables = 32;
        for _ in 0..data.below(5) {
            // Mapped where it fits; what the engine refuses stays unmapped.
            let iova = inside(aperture, data.u64());
            let iova = iova & !((1 << F::GRANULE_LOG2) - 1);
            let pa = data.u64() & ((1 << format.output_bits()) - 1) & !((1 << F::GRANULE_LOG2) - 1);
            let len = u64::from(data.u16()) << F::GRANULE_LOG2;
            let _ = table.map(iova, &[Span::new(pa, len)], Prot::RW);
        }
        // Damage: any word, one that leads to some table, one with some bits turned.
        let per_table = F::TABLE_BYTES as usize / F::ENTRY_BYTES;
        for _ in 0..data.below(32) {
            let page = base + data.below(tables) as u64 * F::TABLE_BYTES;
            let index = usize::from(data.u16()) % per_table;
            let level = data.below(format.levels().into());
            let cell = &memory.entries(page, per_table)[index];
            match data.below(3) {
                0 => cell.set(data.u64()),
                1 if level > 0 => {
                    let to = base + data.below(tables) as u64 * F::TABLE_BYTES;
                    cell.set(format.table(level, to));
                }
                _ => cell.set(cell.get() ^ data.u64()),
            }
        }
        let mut iovas = vec![0, u64::MAX, inside(aperture, 0)];
        for _ in 0..data.below(16) {
            let iova = data.u64();
            iovas.push(iova);
            iovas.push(inside(aperture, iova));
        }
        for &iova in &iovas {
            point(&table, iova);
            let len = (data.u64() >> (data.u8() & 63)).max(1);
            range(&table, iova, len);
        }
        // A table that is damaged still counts its leaves to an end, where there are few.
        range(&table, inside(aperture, 0), u64::MAX);
    }
}

/// The address with the low bits of `iova` that the table translates.
fn inside(aperture: Aperture, iova: u64) -> u64 {
    let above = u64::MAX.checked_shl(aperture.bits).unwrap_or(0);
    let highest = iova >> (aperture.bits - 1) & 1 != 0;
    match aperture.above {
        Above::Ones => iova | above,
        Above::Sign if highest => iova | above,
        _ => iova & !above,
    }
}

/// True for a leaf that is larger than all that the table translates: an Arm entry that claims to be
/// one of a contiguous group for which the root has too few entries. Where such a leaf begins is not
/// said alike by all readers.
fn beyond<F: Format, M: Room>(table: &Table<F, &M>, leaf: Leaf) -> bool {
    leaf.run.len.trailing_zeros() > table.format().aperture().bits
}

/// One address, read in three ways.
fn point<F: Format, M: Room>(table: &Table<F, &M>, iova: u64) {
    let pa = table.translate(iova);
    let leaf = table.leaf_at(iova);
    let first = table.leaves(Span::new(iova, 1)).next();
    let Some(leaf) = leaf else {
        assert_eq!((pa, first), (None, None), "{iova:#x}");
        return;
    };
    if beyond(table, leaf) {
        assert!(pa.is_some() && first.is_some(), "{leaf:?}");
        return;
    }
    assert_eq!(Some(leaf), first, "{iova:#x}");
    assert!(leaf.run.input().contains(iova), "{iova:#x}: {leaf:?}");
    assert_eq!(pa, Some(leaf.run.pa + (iova - leaf.run.iova)), "{leaf:?}");
    assert!(leaf.level < table.format().levels(), "{leaf:?}");
    assert!(
        formats::leaf_sizes::<F>(leaf.level.into()).contains(leaf.run.len),
        "{leaf:?}"
    );
}

/// All leaves of a range, each behind the one before, and the runs that they make.
fn range<F: Format, M: Room>(table: &Table<F, &M>, iova: u64, len: u64) {
    let span = Span::new(iova, len);
    let mut last = None;
    let mut bytes = 0u64;
    let mut all = true;
    for (nth, leaf) in table.leaves(span).enumerate() {
        let run = leaf.run;
        if nth >= ENOUGH {
            all = false;
            break;
        }
        bytes = bytes.saturating_add(run.len);
        if beyond(table, leaf) {
            continue;
        }
        assert!(run.len.is_power_of_two());
        assert_eq!((run.iova | run.pa) & (run.len - 1), 0, "{leaf:?}");
        let end = run.iova.wrapping_add(run.len - 1);
        assert!(
            last.is_none_or(|last| last < end),
            "{leaf:?} behind {last:x?}"
        );
        last = Some(end);
    }
    if all {
        let of_runs = table
            .runs(span)
            .fold(0, |bytes: u64, run| bytes.saturating_add(run.len));
        assert_eq!(of_runs, bytes, "{span:?}");
    }
}
