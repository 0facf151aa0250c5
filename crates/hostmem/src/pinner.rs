//! Pinning of memory by io_uring or `mlock`.
//!
//! A [`Pinner`] pins parts of mappings through io_uring, whose registered buffers are long-term
//! pins of the kernel (`FOLL_LONGTERM`), or with `mlock` where io_uring is refused. `mlock` is the
//! lesser of the two: the pages stay in memory, but the kernel may still move them.
//!
//! A buffer is unpinned only as a whole, so a part is cut into pieces, each a buffer of its own:
//! at the multiples of the piece size from the beginning of the mapping's first huge page on. A pin is all or nothing; when a piece is
//! refused, those before it are given back before the error is returned.

use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use runs::{Offset, Span};
use thiserror::Error;

use crate::backing::Backing;
use crate::buffers::Buffer;
use crate::charge::charge;
use crate::limits::{Counter, Limits, LimitsError};
use crate::mapping::Mapping;
use crate::pin::{Pin, Steps};
use crate::refusal::{Budget, PinError, no_ring, register_error, table_error};
use crate::rings::{FEWEST_BYTES, Table, Tables};

/// Bytes between two looks at whether to go on, when a piece is no larger.
const BATCH: u64 = 128 << 20;
/// Charge for a table by a kernel since 6.14: a page for the rings and one for the entries (`io_create_region()` in
/// `io_uring/memmap.c`).
const TABLE_CHARGE: u64 = 8192;
const SMALLEST_PIECE: u64 = 2 << 20;
const LARGEST_PIECE: u64 = 1 << 30;

/// Method of pinning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinKind {
    /// Registered buffers of io_uring: pages neither leave memory nor move.
    IoUring,
    /// `mlock`: pages do not leave memory, but may move.
    Mlock,
}

/// `io_uring` or `mlock`.
impl std::fmt::Display for PinKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::IoUring => "io_uring",
            Self::Mlock => "mlock",
        })
    }
}

/// Pins memory. Clones share their tables of buffers.
#[derive(Clone, Debug)]
pub struct Pinner {
    piece: u64,
    /// Without tables: `mlock`.
    tables: Option<Arc<Tables>>,
    why: Option<String>,
    limits: Limits,
}

/// Failure to make a pinner.
#[derive(Debug, Error)]
pub enum PinnerError {
    /// A piece that is no power of two from 2 MiB to 1 GiB.
    #[error("a piece of {piece} bytes is no power of two from 2 MiB to 1 GiB")]
    Piece {
        /// The requested size, bytes.
        piece: u64,
    },
    /// The limits cannot be read.
    #[error(transparent)]
    Limits(#[from] LimitsError),
}

impl Pinner {
    /// A pinner through io_uring, or through `mlock` where io_uring is refused: see
    /// [`why`](Self::why). `piece` is the smallest part that can be given back without
    /// registering anew, in bytes: a power of two from 2 MiB to 1 GiB.
    ///
    /// # Errors
    ///
    /// When `piece` is out of bounds or `/proc` is not there.
    pub fn probe(piece: u64) -> Result<Self, PinnerError> {
        let mut pinner = Self::mlock(piece)?;
        match Table::new() {
            Ok(table) => {
                pinner.tables = Some(Arc::new(Tables::new(table)));
                pinner.why = None;
            }
            Err(error) => pinner.why = Some(no_ring(&error)),
        }
        Ok(pinner)
    }

    /// The pinner of this process, in pieces of 2 MiB: [probed](Self::probe) by the first caller, and
    /// the same for all after that.
    ///
    /// # Errors
    ///
    /// When `/proc` is not there.
    pub fn of_process() -> Result<Arc<Self>, PinnerError> {
        static PINNER: Mutex<Option<Arc<Pinner>>> = Mutex::new(None);
        let mut known = PINNER.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pinner) = &*known {
            return Ok(Arc::clone(pinner));
        }
        let pinner = Arc::new(Self::probe(SMALLEST_PIECE)?);
        *known = Some(Arc::clone(&pinner));
        Ok(pinner)
    }

    /// A pinner through `mlock`, wanted or not.
    ///
    /// # Errors
    ///
    /// As [`probe`](Self::probe).
    pub fn mlock(piece: u64) -> Result<Self, PinnerError> {
        if !piece.is_power_of_two() || !(SMALLEST_PIECE..=LARGEST_PIECE).contains(&piece) {
            return Err(PinnerError::Piece { piece });
        }
        Ok(Self {
            piece,
            tables: None,
            why: Some("mlock was asked for".into()),
            limits: Limits::read()?,
        })
    }

    /// Method by which it pins.
    pub const fn kind(&self) -> PinKind {
        match self.tables {
            Some(_) => PinKind::IoUring,
            None => PinKind::Mlock,
        }
    }

    /// Reason for `mlock`; `None` for io_uring.
    pub fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// The counter of the kernel that a pin raises and that can refuse it.
    pub const fn counter(&self) -> Counter {
        match self.kind() {
            PinKind::Mlock => Counter::MmLockedVm,
            PinKind::IoUring if self.limits.privileged => Counter::PinnedVm,
            PinKind::IoUring => Counter::UserLockedVm,
        }
    }

    /// The limits as they were when the pinner was made.
    pub const fn limits(&self) -> Limits {
        self.limits
    }

    /// Bytes that can still be pinned, as far as this process knows: what the limit leaves, less
    /// the pages of the tables of buffers, which recent kernels charge too. `None` without a
    /// limit.
    ///
    /// # Errors
    ///
    /// When `/proc` cannot be read.
    pub fn room(&self) -> Result<Option<u64>, LimitsError> {
        let counter = self.counter();
        let left = Limits::read()?.left(counter)?;
        Ok(left.map(|left| {
            let tables = match counter {
                // The one that is there, and those to come.
                Counter::UserLockedVm => (2 + left / FEWEST_BYTES) * TABLE_CHARGE,
                Counter::MmLockedVm | Counter::PinnedVm => 0,
            };
            left.saturating_sub(tables) & !4095
        }))
    }

    /// The piece in bytes into which memory of `backing` is cut: what was asked for, or a huge
    /// page where that is larger. (The kernel charges a huge page whole to the first buffer that
    /// holds a part of it, and gives the charge back with that buffer.)
    pub fn piece(&self, backing: Backing) -> u64 {
        self.piece.max(backing.page())
    }

    /// Pins `part` (offset and length in the mapping, multiples of 4 KiB). Pages that are not
    /// there are brought in. After each 128 MiB (or each piece, when that is larger) `progress`
    /// receives how many bytes are pinned, and may stop the work.
    ///
    /// # Errors
    ///
    /// When the limit, the memory or `progress` forbids it; nothing is pinned then.
    pub fn pin(
        &self,
        mapping: &Arc<Mapping>,
        part: Span<Offset>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Pin, PinError> {
        let Some(part) = mapping.pages_of(part) else {
            let len = mapping.len();
            return Err(PinError::BadPart { part, len });
        };
        let budget = self.budget(mapping, part)?;
        match &self.tables {
            Some(tables) => self.register(tables, mapping, part, budget, progress),
            None => self.lock(mapping, part, budget, progress),
        }
    }

    /// Refuses what the limit forbids for sure, before anything is touched.
    fn budget(&self, mapping: &Mapping, part: Span<Offset>) -> Result<Option<Budget>, PinError> {
        let counter = self.counter();
        if self.limits.limit(counter).is_none() {
            return Ok(None);
        }
        // The limit may have been changed since this pinner was made.
        let Some(limit) = Limits::read()?.limit(counter) else {
            return Ok(None);
        };
        let needed = match counter {
            // mlock compares the length, even of huge pages, which it then does not count.
            Counter::MmLockedVm => part.len,
            Counter::UserLockedVm | Counter::PinnedVm => charge(mapping, &[part]),
        };
        let budget = Budget {
            needed,
            limit,
            in_use: Limits::in_use(counter)?,
            counter,
        };
        if budget.in_use.known.saturating_add(needed) > limit {
            return Err(budget.exceeded(part.start));
        }
        Ok(Some(budget))
    }

    fn register(
        &self,
        tables: &Arc<Tables>,
        mapping: &Arc<Mapping>,
        part: Span<Offset>,
        budget: Option<Budget>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Pin, PinError> {
        let piece = self.piece(mapping.backing());
        let lead = mapping.lead();
        let end = part.start + part.len;
        // Dropping it on the way gives everything back.
        let mut pin = Pin::buffers(Arc::clone(mapping), Arc::clone(tables));
        let mut at = part.start;
        let mut pieces = Vec::new();
        while at < end {
            pieces.clear();
            let mut cut = at;
            while cut < end && (pieces.is_empty() || cut - at + piece <= BATCH) {
                let next = (((cut + lead) / piece + 1) * piece - lead).min(end);
                pieces.push(Span::new(cut, next - cut));
                cut = next;
            }
            let lease = tables
                .lease(&pieces, &[])
                .map_err(|source| table_error(at, source, budget))?;
            pieces.truncate(lease.count as usize);
            let mut rest = pieces.as_slice();
            let mut slot = lease.first;
            while let Some(first) = rest.first() {
                let result = lease.table.fill(slot, mapping.region(), rest);
                pin.steps.calls += 1;
                let filled = match result {
                    Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                    Ok(filled) => Ok(filled),
                    Err(error) => Err(error),
                };
                let filled = match filled {
                    Ok(filled) => filled,
                    Err(error) => {
                        let error =
                            register_error(&lease.table, slot, mapping, *first, error, budget);
                        let bytes = rest.iter().map(|span| span.len).sum();
                        tables.give_back(&lease.table, slot, rest.len() as u32, bytes);
                        return Err(error);
                    }
                };
                let (done, left) = rest.split_at((filled as usize).min(rest.len()));
                for span in done {
                    pin.hold(Buffer::new(*span, Arc::clone(&lease.table), slot));
                    slot += 1;
                    at = span.start + span.len;
                }
                rest = left;
            }
            let done = at - part.start;
            if progress(done).is_break() && at < end {
                return Err(PinError::Interrupted { done });
            }
        }
        Ok(pin)
    }

    fn lock(
        &self,
        mapping: &Arc<Mapping>,
        part: Span<Offset>,
        budget: Option<Budget>,
        progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Pin, PinError> {
        {
            let mut locked = mapping
                .locked
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(held) = locked.iter().find(|held| held.overlaps(&part)) {
                let held = *held;
                return Err(PinError::AlreadyLocked { part, held });
            }
            locked.push(part);
        }
        // Dropping it on the way unlocks the whole part, also what mlock had only begun.
        let mut pin = Pin::locked(Arc::clone(mapping), part);
        let mut at = part.start;
        let end = part.start + part.len;
        while at < end {
            let step = Span::new(at, (64 << 20).min(end - at));
            pin.steps = Steps {
                calls: pin.steps.calls + 1,
                buffers: 0,
            };
            if let Err(source) = mapping.region().lock(step) {
                return Err(match (source.raw_os_error(), budget) {
                    (Some(libc::ENOMEM | libc::EPERM), Some(budget))
                        if budget.in_use.known + (at - part.start) + step.len > budget.limit =>
                    {
                        budget.exceeded(at)
                    }
                    _ => PinError::Refused {
                        offset: at,
                        kind: PinKind::Mlock,
                        source,
                    },
                });
            }
            at += step.len;
            let done = at - part.start;
            if progress(done).is_break() && at < end {
                return Err(PinError::Interrupted { done });
            }
        }
        Ok(pin)
    }
}
