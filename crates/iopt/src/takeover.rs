//! Taking over tables that are there already.
//!
//! A process that owned tables is gone, or has handed over; units go on walking them. A new
//! owner must know which pages they are before it hands out any page of that memory, and must
//! not change a byte that a unit reads. So an arena over such memory begins as a [`Takeover`]:
//!
//! 1. [`Takeover::new`] over the memory in which the tables lie, at the addresses at which units
//!    know them;
//! 2. [`adopt`](Takeover::adopt) for each table: it is looked at entry by entry, and refused with
//!    the place that is wrong; its pages are noted. Only the [`Meta`](crate::Meta)s beside the
//!    tables are written to, never the tables;
//! 3. [`finish`](Takeover::finish) makes an [`Arena`] of it, in which every other page is free;
//! 4. [`Adopted::open`] makes a [`Table`] of each.
//!
//! Each page is marked once, when the first link to it is followed. So loops, pages that are linked
//! twice, and addresses outside of the memory are refused without a search.
//!
//! [`restore`](Takeover::restore) puts the tables of an [`Image`] where they lay, for memory that is
//! new, and adopts them.

use runs::{Pa, PageSizes, Span};

use crate::arena::{Arena, ArenaError, Storage};
use crate::cell::Cell;
use crate::engine::top::Top;
use crate::engine::{Damage, DamageKind, Table, inspect};
use crate::error::BuildError;
use crate::format::{Format, Root};
use crate::image::{Image, ImageError};
use crate::memory::TableMemory;

/// An arena to be, whose tables are being taken over.
#[derive(Debug)]
pub struct Takeover<S: Storage, const TABLE_LOG2: u32 = 12> {
    arena: Arena<S, TABLE_LOG2>,
    /// Number of the table that is being adopted, from 1 on.
    attempt: u32,
}

/// A table that was found intact: its pages are taken.
#[derive(Debug)]
#[must_use = "its tables stay out of use until it is opened"]
pub struct Adopted<F> {
    format: F,
    root: u64,
    sizes: PageSizes,
    /// Tables, the root counting as one.
    tables: u64,
    last_address: u64,
    /// They were stored just now.
    stored: bool,
}

/// Why a table is not adopted. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// There can be no root at this address.
    #[error("there can be no root table at {address:#x}")]
    Root {
        /// The address.
        address: u64,
    },
    /// An entry is not what it should be.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The settings do not fit the format or the memory.
    #[error(transparent)]
    Build(BuildError),
    /// The memory is not the one in which the table was adopted.
    #[error("the table was adopted in other memory")]
    OtherMemory,
    /// These are not whole pages of the memory of which none is taken.
    #[error("{span} cannot be kept out of use")]
    Pages {
        /// Which.
        span: Span<Pa>,
    },
}

/// Note beside a page that belongs to no table. Other pages have the number of the attempt that
/// took them.
const UNTAKEN: u64 = u32::MAX as u64;

impl<S: Storage, const TABLE_LOG2: u32> Takeover<S, TABLE_LOG2> {
    /// Over `storage`, whatever its cells hold; its first byte has the address `base`, as it had for
    /// the process that wrote the tables.
    pub fn new(storage: S, base: u64) -> Result<Self, ArenaError> {
        let arena = Arena::used_up(storage, base)?;
        for page in pages(&arena) {
            let meta = arena.meta(page);
            meta.note.set(UNTAKEN);
        }
        Ok(Self { arena, attempt: 0 })
    }

    /// Takes the table with its root at `root`, of this format and configuration, whose leaves are
    /// to be of the given sizes from now on.
    ///
    /// Units may walk the table meanwhile, and set accessed and dirty bits in it. Nothing else may
    /// change it.
    pub fn adopt<F: Format>(
        &mut self,
        format: F,
        root: u64,
        sizes: PageSizes,
    ) -> Result<Adopted<F>, AdoptError> {
        const {
            assert!(
                F::ENTRY_BYTES == S::Cell::BYTES,
                "the cell is not of the format's width"
            );
            assert!(
                F::TABLE_BYTES == 1 << TABLE_LOG2,
                "the arena's tables are not of the format's size"
            );
        }
        self.adopt_fitting(format, root, sizes)
    }

    /// [`adopt`](Self::adopt), for a format that is chosen at run time: it may not fit the memory.
    pub(crate) fn adopt_fitting<F: Format>(
        &mut self,
        format: F,
        root: u64,
        sizes: PageSizes,
    ) -> Result<Adopted<F>, AdoptError> {
        let wanted = (F::ENTRY_BYTES, F::TABLE_BYTES);
        let offered = (S::Cell::BYTES, 1 << TABLE_LOG2);
        if wanted != offered {
            let format = format.id();
            return Err(AdoptError::Build(BuildError::TableMemory {
                format,
                wanted,
                offered,
            }));
        }
        let offered = F::page_sizes(format.levels());
        let kept = offered.and(sizes);
        if kept.is_empty() {
            let wanted = sizes;
            return Err(AdoptError::Build(BuildError::PageSizes { wanted, offered }));
        }
        let top = usize::from(format.levels()) - 1;
        let bytes = (format.entries(top) * F::ENTRY_BYTES) as u64;
        let bytes = bytes.next_power_of_two().max(1 << TABLE_LOG2);
        self.attempt += 1;
        let mut tables = 0;
        let taken = if root & (bytes - 1) == 0 && self.take(root, bytes) {
            self.take_below(&format, root, top, &mut tables)
        } else {
            Err(AdoptError::Root { address: root })
        };
        if let Err(cause) = taken {
            self.give_up();
            return Err(cause);
        }
        Ok(Adopted {
            format,
            root,
            sizes: kept,
            tables,
            last_address: self.arena.last_address(),
            stored: false,
        })
    }

    /// Keeps the pages of `span` out of use, for instance those of a unit's structures and queues: the
    /// arena does not hand them out until they are [given
    /// back](TableMemory::reclaim).
    pub fn keep(&mut self, span: Span<Pa>) -> Result<(), AdoptError> {
        let pages = 1 << TABLE_LOG2;
        let whole = span.is_aligned(pages) && !span.is_empty();
        self.attempt += 1;
        if whole && self.take(span.start, span.len) {
            return Ok(());
        }
        Err(AdoptError::Pages { span })
    }

    /// Stores the tables of an image where they lay when it was made, and adopts them. All of it is
    /// checked first; the pages must belong to no table that was adopted before.
    pub fn restore<F: Format>(
        &mut self,
        image: &Image<'_>,
        format: F,
    ) -> Result<Adopted<F>, ImageError> {
        image.check(&format)?;
        let tables = || {
            let below = image.tables().map(|(table, _)| table);
            core::iter::once(image.root_table()).chain(below)
        };
        for table in tables() {
            let pages = table.bytes().div_ceil(1 << TABLE_LOG2);
            for page in 0..pages {
                let address = table.address + (page << TABLE_LOG2);
                if !self.is_untaken(address) {
                    let table = table.address;
                    return Err(ImageError::Taken { table });
                }
            }
        }
        for table in tables() {
            let cells = self.arena.entries(table.address, table.count());
            for (index, cell) in cells.iter().enumerate() {
                cell.set(table.word(index));
            }
        }
        match self.adopt(format, image.root().address, image.page_sizes()) {
            Ok(adopted) => Ok(Adopted {
                stored: true,
                ..adopted
            }),
            Err(AdoptError::Damage(damage)) => Err(ImageError::Damage(damage)),
            Err(AdoptError::Build(cause)) => Err(ImageError::Build(cause)),
            Err(AdoptError::Root { .. } | AdoptError::OtherMemory | AdoptError::Pages { .. }) => {
                Err(ImageError::Taken {
                    table: image.root().address,
                })
            }
        }
    }

    /// The arena: what was adopted is in use, all other pages are free, and none is known to be
    /// zero.
    ///
    /// A root that is larger than other tables needs room that was never used: such an arena has
    /// none, and builds no new table of a format with such a root.
    pub fn finish(self) -> Arena<S, TABLE_LOG2> {
        for page in pages(&self.arena).rev() {
            let meta = self.arena.meta(page);
            if meta.note.get() == UNTAKEN {
                self.arena.add_free(page);
            }
        }
        self.arena
    }

    fn is_untaken(&self, page: u64) -> bool {
        self.arena.contains(page) && self.arena.meta(page).note.get() == UNTAKEN
    }

    /// Takes the pages of `bytes` bytes at `table`, or none.
    fn take(&self, table: u64, bytes: u64) -> bool {
        let pages = || (0..bytes >> TABLE_LOG2).map(|page| table + (page << TABLE_LOG2));
        let all = pages().all(|page| self.is_untaken(page));
        if all {
            for page in pages() {
                self.arena.meta(page).note.set(self.attempt.into());
            }
        }
        all
    }

    /// Looks at the table at `table`, which is taken, and takes those below it.
    fn take_below<F: Format>(
        &self,
        format: &F,
        table: u64,
        level: usize,
        tables: &mut u64,
    ) -> Result<(), AdoptError> {
        let cells = self.arena.entries(table, format.entries(level));
        let word = |index: usize| cells.get(index).map_or(0, Cell::get_acquire);
        inspect::<F, AdoptError>(format, table, level, word, |index, word, below| {
            let damage = |kind| Damage {
                table,
                level: level as u8,
                index: index as u32,
                word,
                kind,
            };
            if !self.arena.contains(below) || below & (F::TABLE_BYTES - 1) != 0 {
                return Err(damage(DamageKind::Foreign { table: below }).into());
            }
            if !self.take(below, F::TABLE_BYTES) {
                return Err(damage(DamageKind::Shared { table: below }).into());
            }
            self.take_below(format, below, level - 1, tables)
        })?;
        *tables += 1;
        Ok(())
    }

    /// Releases what this attempt has taken.
    fn give_up(&self) {
        for page in pages(&self.arena) {
            let meta = self.arena.meta(page);
            if meta.note.get() == u64::from(self.attempt) {
                meta.note.set(UNTAKEN);
            }
        }
    }
}

/// The addresses of all pages of an arena.
fn pages<S: Storage, const TABLE_LOG2: u32>(
    arena: &Arena<S, TABLE_LOG2>,
) -> impl DoubleEndedIterator<Item = u64> + use<S, TABLE_LOG2> {
    let base = arena.base();
    (0..arena.size() >> TABLE_LOG2).map(move |page| base + (page << TABLE_LOG2))
}

#[cfg(feature = "alloc")]
impl<F> Adopted<F> {
    pub(crate) const fn format(&self) -> &F {
        &self.format
    }

    pub(crate) fn with_format<G>(self, format: G) -> Adopted<G> {
        Adopted {
            format,
            root: self.root,
            sizes: self.sizes,
            tables: self.tables,
            last_address: self.last_address,
            stored: self.stored,
        }
    }
}

impl<F: Format> Adopted<F> {
    /// The root that units walk it from.
    pub fn root(&self) -> Root {
        Root {
            format: self.format.id(),
            address: self.root,
            levels: self.format.levels(),
        }
    }

    /// Tables in use, the root among them.
    pub const fn tables(&self) -> u64 {
        self.tables
    }

    /// The table, as if it had always been ours. `memory` is the arena of
    /// [`Takeover::finish`], or leads to it.
    ///
    /// Table memory with a record ([`Checked`](crate::observe::Checked)) receives all leaves.
    pub fn open<M: TableMemory>(self, memory: M) -> Result<Table<F, M>, AdoptError> {
        if memory.last_address() != self.last_address || memory.table_bytes() != F::TABLE_BYTES {
            return Err(AdoptError::OtherMemory);
        }
        let bits = self.format.output_bits();
        if self.last_address >> bits.min(63) != 0 {
            let last = self.last_address;
            return Err(AdoptError::Build(BuildError::TableAddress { last, bits }));
        }
        let tables = M::Link::default();
        tables.set(self.tables);
        let mut table = Table {
            format: self.format,
            memory,
            top: Top::new(self.root, self.format.levels()),
            dirty: M::Link::default(),
            keeps_empty: false,
            has_empty: false,
            shared: false,
            sizes: self.sizes,
            tables,
            broken: M::Link::default(),
        };
        if self.stored {
            table.for_each_table(&mut |address, level| {
                table.memory.written(table.entries(address, level.into()));
            });
        }
        table.look_for_empty_tables();
        table.announce_all();
        table
            .intact()
            .map_err(|cause| AdoptError::Build(cause.into()))?;
        Ok(table)
    }
}
