//! The tables of one format, and the operations that are timed on them.

use std::convert::Infallible;
use std::hint::black_box;

use iopt::{
    ArenaError, Cell, Format, Gather, Interruption, Invalidation, Pending, Prot, Table,
    TableMemory, TableOps as _,
};
use runs::{Iova, PageSizes, Run, Span};

use super::super::BenchError;
use super::super::report::{Group, Key, Subject, Unit};
use super::super::rounds::{Rounds, timed};
use super::{Case, Shape};

/// Pages of an operation on many.
const MANY: u64 = 256;
/// Pages that are harvested.
const HARVESTED: u64 = 512;
/// Operations of a bracket.
const RANGES: u64 = 8;
/// Operations of a bracket on single pages.
const SINGLES: u64 = 64;
/// Brackets of a sample.
const BRACKETS: u32 = 16;
/// Where memory begins: as all formats reach it, and a multiple of the largest block.
const PA: u64 = 1 << 30;

/// A table that keeps dirty state, and what is harvested from it.
type Tracked<F, T> = (Table<F, T>, Pending<Vec<u64>>);

/// The tables of one format, one for each kind of operation.
pub(super) struct Fixture<F, T: TableMemory> {
    shape: Shape,
    pages: Table<F, T>,
    blocks: Option<Table<F, T>>,
    resize: Option<Table<F, T>>,
    dirty: Option<Tracked<F, T>>,
    /// Memory for loops of stores, and the tables in it.
    stores: T,
    cells: Vec<u64>,
}

impl<F: Format, T: TableMemory> Fixture<F, T> {
    pub(super) fn new(
        shape: Shape,
        format: F,
        dirty: Option<F>,
        memory: impl Fn(u64) -> Result<T, ArenaError>,
    ) -> Result<Self, BenchError> {
        let Shape { name, page, block } = shape;
        // Where tables must lie low, the window takes the upper half of what they can reach.
        let base = 1 << (format.table_bits() - 1).min(46);
        let memory = || {
            memory(base).map_err(|source| BenchError::Arena {
                format: name,
                source,
            })
        };
        let table = |format: F, sizes: u64, keep| {
            let sizes = PageSizes::from_bits(sizes);
            let table = Table::with_page_sizes(format, memory()?, sizes);
            let mut table = table.map_err(|source| BenchError::Build {
                format: name,
                source,
            })?;
            table.keep_empty_tables(keep);
            Ok::<_, BenchError>(table)
        };
        let stores = memory()?;
        let refused = |op| BenchError::Refused {
            group: Group::Tables,
            op,
            format: name,
        };
        let mut cells = Vec::new();
        for _ in 0..RANGES {
            let cell = stores.allocate(T::TABLE_BYTES as usize);
            cells.push(cell.map_err(|_| refused("stores"))?);
        }
        let mut resize = block
            .map(|block| table(format, page | block, false))
            .transpose()?;
        if let (Some(table), Some(block)) = (&mut resize, block) {
            let well = ranges(block, 1).all(|range| map(table, range));
            well.then_some(()).ok_or(refused("split 1 block"))?;
        }
        let dirty = dirty.map(|format| {
            let mut table = table(format, page, false)?;
            let range = harvested(page);
            let words = vec![0; HARVESTED.div_ceil(64) as usize];
            let pending = Pending::new(words, range, page);
            match (table.track_dirty(true), map(&mut table, range), pending) {
                (Ok(()), true, Ok(pending)) => Ok((table, pending)),
                _ => Err(refused("harvest 512 pages")),
            }
        });
        Ok(Self {
            shape,
            pages: table(format, page, true)?,
            blocks: block.map(|block| table(format, block, true)).transpose()?,
            resize,
            dirty: dirty.transpose()?,
            stores,
            cells,
        })
    }

    /// Notes the mean of all brackets; each is of `operations` operations on `bytes` bytes.
    fn note(
        &self,
        rounds: &mut Rounds,
        subject: Subject,
        op: &'static str,
        bytes: u64,
        time: Option<f64>,
    ) -> Result<(), BenchError> {
        let format = self.shape.name;
        let key = Key {
            group: Group::Tables,
            op,
            memory: "",
            format,
            subject,
            threads: 1,
            size_bytes: bytes,
            unit: Unit::Nanoseconds,
        };
        let group = Group::Tables;
        let time = time.ok_or(BenchError::Refused { group, op, format })?;
        rounds.note(key, time);
        Ok(())
    }

    /// Map and unmap single pages, or many.
    fn map_and_unmap(&mut self, rounds: &mut Rounds, kind: Kind) -> Result<(), BenchError> {
        let Some(page) = kind.page(&self.shape) else {
            return Ok(());
        };
        let [map_op, unmap_op] = kind.ops();
        for subject in kind.subjects() {
            let table = match kind {
                Kind::Blocks => self.blocks.as_mut(),
                Kind::Single | Kind::Pages => Some(&mut self.pages),
            };
            let Some(table) = table else { break };
            let ranges: Vec<Span<Iova>> = kind.ranges(page);
            let by_page = *subject == Subject::ByPage;
            let [map, unmap] = match subject {
                Subject::Stores => store_loops(&self.stores, &self.cells),
                _ => pairs(
                    table,
                    &ranges,
                    |table, range| match by_page {
                        true => pages_of(range, page).all(|page| map(table, page)),
                        false => map(table, range),
                    },
                    |table, range| match by_page {
                        true => unmap(table, pages_of(range, page)),
                        false => unmap(table, [range]),
                    },
                ),
            };
            let bytes = page * kind.count();
            self.note(rounds, *subject, map_op, bytes, map)?;
            self.note(rounds, *subject, unmap_op, bytes, unmap)?;
        }
        Ok(())
    }

    fn split_and_merge(&mut self, rounds: &mut Rounds) -> Result<(), BenchError> {
        let (page, Some(block)) = (self.shape.page, self.shape.block) else {
            return Ok(());
        };
        let ranges: Vec<Span<Iova>> = ranges(block, 1).collect();
        for subject in [Subject::ByPage, Subject::Dmaspace] {
            let Some(table) = &mut self.resize else { break };
            let [split, merge] = match subject {
                Subject::ByPage => pairs(
                    table,
                    &ranges,
                    |table, range| {
                        unmap(table, [range]) && pages_of(range, page).all(|page| map(table, page))
                    },
                    |table, range| unmap(table, pages_of(range, page)) && map(table, range),
                ),
                _ => pairs(
                    table,
                    &ranges,
                    |table, range| {
                        flushed(table, |table, gather| {
                            let allowed = Interruption::Allowed;
                            table.split(range, page, allowed, gather, flush).is_ok()
                        })
                    },
                    |table, range| {
                        flushed(table, |table, gather| {
                            table
                                .merge(range, Interruption::Allowed, gather, flush)
                                .is_ok()
                        })
                    },
                ),
            };
            self.note(rounds, subject, "split 1 block", block, split)?;
            self.note(rounds, subject, "merge 1 block", block, merge)?;
        }
        Ok(())
    }

    fn harvest(&mut self, rounds: &mut Rounds) -> Result<(), BenchError> {
        let page = self.shape.page;
        let range = harvested(page);
        for subject in [Subject::ByPage, Subject::Dmaspace] {
            let Some((table, pending)) = &mut self.dirty else {
                break;
            };
            let (mut sum, mut well) = (0.0, true);
            for _ in 0..BRACKETS {
                well &= table.set_dirty(range).is_ok_and(|bytes| bytes == range.len);
                let mut found = 0;
                sum += timed(|| {
                    let mut harvest = |part| table.harvest(part, pending).is_ok();
                    well &= match subject {
                        Subject::ByPage => pages_of(range, page).all(&mut harvest),
                        _ => harvest(range),
                    };
                    let Ok(shown) = pending.flush_with(flush);
                    found = shown.runs().map(|run| run.len).sum::<u64>();
                    shown.acknowledge();
                });
                well &= found == range.len;
            }
            let time = well.then_some(sum / f64::from(BRACKETS));
            self.note(rounds, subject, "harvest 512 pages", range.len, time)?;
        }
        Ok(())
    }

    fn translate(&mut self, rounds: &mut Rounds) -> Result<(), BenchError> {
        let (table, page) = (&mut self.pages, self.shape.page);
        let all: Vec<Span<Iova>> = ranges(page, MANY).collect();
        let mut well = all.iter().all(|range| map(table, *range));
        // Every page once, far from the one before: 97 has no part in 2048.
        let pages = MANY * RANGES;
        let start = all.first().map_or(0, |range| range.start);
        let time = timed(|| {
            for nth in 0..pages {
                let at = start + nth * 97 % pages * page;
                well &= black_box(table.translate(black_box(at))).is_some();
            }
        });
        well &= all.iter().all(|range| unmap(table, [*range]));
        let time = well.then_some(time / pages as f64);
        self.note(rounds, Subject::Dmaspace, "translate", page, time)
    }
}

impl<F: Format, T: TableMemory> Case for Fixture<F, T> {
    fn round(&mut self, rounds: &mut Rounds) -> Result<(), BenchError> {
        for kind in [Kind::Single, Kind::Pages, Kind::Blocks] {
            self.map_and_unmap(rounds, kind)?;
        }
        self.split_and_merge(rounds)?;
        self.harvest(rounds)?;
        self.translate(rounds)
    }
}

/// Kind of leaves that are mapped and unmapped at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Single,
    Pages,
    Blocks,
}

impl Kind {
    const fn page(self, shape: &Shape) -> Option<u64> {
        match self {
            Self::Single | Self::Pages => Some(shape.page),
            Self::Blocks => shape.block,
        }
    }

    const fn count(self) -> u64 {
        match self {
            Self::Single => 1,
            Self::Pages | Self::Blocks => MANY,
        }
    }

    const fn ops(self) -> [&'static str; 2] {
        match self {
            Self::Single => ["map 1 page", "unmap 1 page"],
            Self::Pages => ["map 256 pages", "unmap 256 pages"],
            Self::Blocks => ["map 256 blocks", "unmap 256 blocks"],
        }
    }

    /// A single page is a page whichever way.
    const fn subjects(self) -> &'static [Subject] {
        match self {
            Self::Single => &[Subject::Dmaspace],
            Self::Pages | Self::Blocks => &[Subject::ByPage, Subject::Dmaspace, Subject::Stores],
        }
    }

    fn ranges(self, page: u64) -> Vec<Span<Iova>> {
        match self {
            Self::Single => (0..SINGLES)
                .map(|nth| Span::new((MANY + 2 * nth) * page, page))
                .collect(),
            Self::Pages | Self::Blocks => ranges(page, MANY).collect(),
        }
    }
}

/// Ranges of `count` pages, one behind the other.
fn ranges(page: u64, count: u64) -> impl Iterator<Item = Span<Iova>> {
    (0..RANGES).map(move |nth| Span::new((MANY + nth * count) * page, count * page))
}

const fn harvested(page: u64) -> Span<Iova> {
    Span::new(HARVESTED * page, HARVESTED * page)
}

fn pages_of(range: Span<Iova>, page: u64) -> impl Iterator<Item = Span<Iova>> {
    (0..range.len / page).map(move |nth| Span::new(range.start + nth * page, page))
}

/// Nanoseconds of one operation of each of a pair that undo each other; `None` if one was refused.
fn pairs<T>(
    table: &mut T,
    ranges: &[Span<Iova>],
    first: impl Fn(&mut T, Span<Iova>) -> bool,
    second: impl Fn(&mut T, Span<Iova>) -> bool,
) -> [Option<f64>; 2] {
    let (mut sums, mut well) = ([0.0; 2], true);
    for _ in 0..BRACKETS {
        sums[0] += timed(|| {
            for range in black_box(ranges) {
                well &= first(table, *range);
            }
        });
        sums[1] += timed(|| {
            for range in black_box(ranges) {
                well &= second(table, *range);
            }
        });
    }
    let operations = f64::from(BRACKETS) * ranges.len() as f64;
    sums.map(|sum| well.then_some(sum / operations))
}

/// Nanoseconds to store and to take [`MANY`] entries.
fn store_loops<T: TableMemory>(memory: &T, tables: &[u64]) -> [Option<f64>; 2] {
    let cells = |table: u64| memory.entries(table, MANY as usize);
    if tables
        .iter()
        .any(|table| cells(*table).len() as u64 != MANY)
    {
        return [None; 2];
    }
    let mut sums = [0.0; 2];
    for _ in 0..BRACKETS {
        sums[0] += timed(|| {
            for table in black_box(tables) {
                for (nth, cell) in (0u64..).zip(cells(*table)) {
                    cell.set((PA + (nth << 12)) | 0b111);
                }
            }
        });
        sums[1] += timed(|| {
            for table in black_box(tables) {
                for cell in cells(*table) {
                    black_box(cell.get());
                    cell.set(0);
                }
            }
        });
    }
    sums.map(|sum| Some(sum / f64::from(BRACKETS) / tables.len() as f64))
}

/// Tells a unit that is not there.
fn flush(what: &Invalidation) -> Result<(), Infallible> {
    black_box(what);
    Ok(())
}

fn take(run: Run) {
    black_box(run);
}

#[inline]
fn map<F: Format, T: TableMemory>(table: &mut Table<F, T>, range: Span<Iova>) -> bool {
    let memory = [Span::new(PA + range.start, range.len)];
    table.map(range.start, black_box(&memory), Prot::RW).is_ok()
}

/// Unmaps ranges, with one flush for all of them.
#[inline]
fn unmap<F: Format, T: TableMemory>(
    table: &mut Table<F, T>,
    ranges: impl IntoIterator<Item = Span<Iova>>,
) -> bool {
    flushed(table, |table, gather| {
        ranges.into_iter().all(|range| {
            let removed = table.unmap_mapped(range, gather, &mut take);
            removed.is_ok_and(|bytes| bytes == range.len)
        })
    })
}

/// An operation whose gather is then flushed, and its tables given back.
#[inline]
fn flushed<F: Format, T: TableMemory>(
    table: &mut Table<F, T>,
    operation: impl FnOnce(&mut Table<F, T>, &mut Gather) -> bool,
) -> bool {
    let mut gather = Gather::new();
    let well = operation(table, &mut gather);
    let Ok(flushed) = gather.flush_with(flush);
    table.reclaim(flushed);
    well
}
