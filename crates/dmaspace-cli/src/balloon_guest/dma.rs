//! Memory for queues and messages: a part of this process that is pinned, at its physical addresses.
//!
//! What the device sees must be contiguous for it. So 2 MiB are asked for, in one page if there is one,
//! and the longest physical run of them is used.
//!
//! The device writes memory while this process does. Cells are words of eight bytes; a part of one is
//! replaced in one atomic step, so nothing that the device writes beside it is lost.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use hostmem::{Backing, FrameSource, Mapping, Pin, Pinner};
use runs::{GuestAddr, Offset, Span};
use virtio_balloon::driver::Memory;

use super::GuestError;

const BYTES: u64 = 2 << 20;
const PAGE: u64 = 4096;

pub(super) struct DmaMemory {
    mapping: Arc<Mapping>,
    /// The physical run, and where it begins in the mapping.
    run: Span<GuestAddr>,
    offset: u64,
    /// What nobody has, in order.
    free: Vec<Span<GuestAddr>>,
    _pin: Pin,
}

impl DmaMemory {
    pub(super) fn new(pinner: &Pinner) -> Result<Self, GuestError> {
        let mapping = Mapping::new(Backing::Thp, BYTES, None).map_err(GuestError::other)?;
        let mapping = Arc::new(mapping);
        let whole = Span::new(0, BYTES);
        let pin = pinner.pin(&mapping, whole, &mut |_| ControlFlow::Continue(()));
        let pin = pin.map_err(GuestError::other)?;
        let (mut run, mut offset, mut at) = (Span::default(), 0, 0);
        runs_of(&pin, whole, &mut |found| {
            if found.len > run.len {
                (run, offset) = (found, at);
            }
            at += found.len;
        })?;
        Ok(Self {
            mapping,
            run,
            offset,
            free: vec![run],
            _pin: pin,
        })
    }

    /// The word that holds `address`, and by how many bits the byte there is shifted.
    fn word(&self, address: u64) -> Result<(&AtomicU64, u32), GuestError> {
        let inside = address.checked_sub(self.run.start);
        let inside = inside.filter(|inside| *inside < self.run.len);
        let at = inside.ok_or(GuestError::Outside { address })? + self.offset;
        let cell = self.mapping.cells().get((at / 8) as usize);
        let cell = cell.ok_or(GuestError::Outside { address })?;
        Ok((cell, (at % 8) as u32 * 8))
    }

    /// Replaces up to eight bytes of one word.
    fn replace(&self, address: u64, bytes: &[u8], order: Ordering) -> Result<(), GuestError> {
        let (cell, shift) = self.word(address)?;
        let (mut value, mut mask) = ([0; 8], [0; 8]);
        value[..bytes.len()].copy_from_slice(bytes);
        mask[..bytes.len()].fill(0xff);
        let value = u64::from_le_bytes(value) << shift;
        let mask = u64::from_le_bytes(mask) << shift;
        let change = |word| Some((u64::from_le(word) & !mask | value).to_le());
        // It never refuses.
        let _ = cell.fetch_update(order, Ordering::Relaxed, change);
        Ok(())
    }
}

/// Hands each run of a pinned part to `each`, in order.
pub(super) fn runs_of(
    pin: &Pin,
    part: Span<Offset>,
    each: &mut dyn FnMut(Span<GuestAddr>),
) -> Result<(), GuestError> {
    let mut frames = pin
        .runs(part, FrameSource::Pagemap)
        .map_err(GuestError::other)?;
    let mut joiner = runs::Joiner::new();
    let mut batch = [Span::default(); 64];
    loop {
        match frames.next_batch(&mut batch).map_err(GuestError::other)? {
            0 => break,
            count => batch[..count]
                .iter()
                // What this kernel calls physical are the guest's addresses: it runs in the guest.
                .filter_map(|run| joiner.push(run.cast()))
                .for_each(&mut *each),
        }
    }
    joiner.finish().into_iter().for_each(each);
    Ok(())
}

/// As many pieces as it takes, none of which crosses a word.
fn pieces(address: u64, len: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let here = address.wrapping_add(at as u64);
        let count = (8 - (here % 8) as usize).min(len - at);
        let piece = (here, at..at + count);
        at += count;
        (count > 0).then_some(piece)
    })
}

impl Memory for DmaMemory {
    type Error = GuestError;
    type Words = Vec<u64>;
    type Bytes = Vec<u8>;

    fn words(&mut self, count: usize) -> Option<Vec<u64>> {
        zeros(count)
    }

    fn bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        zeros(count)
    }

    fn allocate(&mut self, len: u64) -> Option<u64> {
        let len = len.checked_next_multiple_of(PAGE)?;
        let place = self.free.iter().position(|free| free.len >= len)?;
        let free = &mut self.free[place];
        let address = free.start;
        *free = Span::new(address.wrapping_add(len), free.len - len);
        if free.is_empty() {
            self.free.remove(place);
        }
        let zeros = [0; 64];
        for at in (0..len).step_by(zeros.len()) {
            self.write(address + at, &zeros).ok()?;
        }
        Some(address)
    }

    fn free(&mut self, memory: Span<GuestAddr>) {
        let len = memory.len.next_multiple_of(PAGE);
        self.free.push(Span::new(memory.start, len));
        self.free.sort_unstable_by_key(|free| free.start);
        self.free.dedup_by(|next, free| {
            let joins = free.start.wrapping_add(free.len) == next.start;
            if joins {
                free.len += next.len;
            }
            joins
        });
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), GuestError> {
        for (here, part) in pieces(address, bytes.len()) {
            let (cell, shift) = self.word(here)?;
            let word = u64::from_le(cell.load(Ordering::Relaxed)) >> shift;
            let len = part.len();
            bytes[part].copy_from_slice(&word.to_le_bytes()[..len]);
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), GuestError> {
        for (here, part) in pieces(address, bytes.len()) {
            match <[u8; 8]>::try_from(&bytes[part.clone()]) {
                Ok(word) => {
                    let (cell, _) = self.word(here)?;
                    cell.store(u64::from_le_bytes(word).to_le(), Ordering::Relaxed);
                }
                Err(_) => self.replace(here, &bytes[part], Ordering::Relaxed)?,
            }
        }
        Ok(())
    }

    fn load(&self, address: u64) -> Result<u16, GuestError> {
        let (cell, shift) = self.word(address)?;
        Ok((u64::from_le(cell.load(Ordering::Acquire)) >> shift) as u16)
    }

    fn store(&self, address: u64, value: u16) -> Result<(), GuestError> {
        self.replace(address, &value.to_le_bytes(), Ordering::Release)
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

fn zeros<T: Clone + Default>(count: usize) -> Option<Vec<T>> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).ok()?;
    all.resize(count, T::default());
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn no_piece_crosses_a_word() {
        let found: Vec<_> = pieces(6, 12).collect();
        assert_eq!(found, [(6, 0..2), (8, 2..10), (16, 10..12)]);
        assert_eq!(pieces(8, 0).count(), 0);
    }
}
