//! Registered buffers, and giving back a part of them.
//!
//! The rest of a buffer that is cut is registered in a table that holds neither end of the old ones: see
//! [`crate::rings`].

use std::io;
use std::sync::Arc;

use runs::{Offset, Span};

use crate::mapping::Mapping;
use crate::pin::{Steps, UnpinError};
use crate::rings::{Table, Tables};

/// A registered buffer: a part of the mapping in a slot of a table.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) span: Span<Offset>,
    table: Arc<Table>,
    slot: u32,
}

impl Buffer {
    pub(crate) const fn new(span: Span<Offset>, table: Arc<Table>, slot: u32) -> Self {
        Self { span, table, slot }
    }
}

/// Gives back `part`, every byte of which the buffers hold. They are in order of their offsets.
pub(crate) fn release_buffers(
    mapping: &Mapping,
    tables: &Arc<Tables>,
    buffers: &mut Vec<Buffer>,
    part: Span<Offset>,
    steps: &mut Steps,
) -> Result<(), UnpinError> {
    let low = buffers.partition_point(|buffer| buffer.span.last() < part.start);
    let high = buffers.partition_point(|buffer| buffer.span.start <= part.last());
    let (Some(first), Some(last)) = (buffers.get(low), buffers.get(high.wrapping_sub(1))) else {
        return Ok(());
    };
    let old = [first.table.id, last.table.id];
    let head = Span::new(first.span.start, part.start - first.span.start);
    let tail = Span::new(part.last() + 1, last.span.last() - part.last());
    let mut kept = Vec::new();
    for stays in [head, tail].into_iter().filter(|span| !span.is_empty()) {
        steps.calls += 1;
        match register_one(mapping, tables, stays, &old) {
            Ok(buffer) => kept.push(buffer),
            Err(source) => {
                if let Err((_, error)) = drop_buffers(tables, &kept) {
                    tracing::error!(%error, "a piece stays pinned twice");
                }
                return Err(UnpinError::Keep { stays, source });
            }
        }
    }
    steps.buffers += kept.len() as u64;
    let result = drop_buffers(tables, buffers.get(low..high).unwrap_or_default());
    let dropped = match &result {
        Ok(()) => high - low,
        Err((done, _)) => *done,
    };
    if dropped < high - low {
        // A part that is held twice now is left to the old buffers.
        kept.retain(|buffer| {
            dropped > 0 && buffer.span.start < part.start || {
                if let Err((_, error)) = drop_buffers(tables, std::slice::from_ref(buffer)) {
                    tracing::error!(%error, "a piece stays pinned twice");
                }
                false
            }
        });
    }
    buffers.splice(low..low + dropped, kept);
    result.map_err(|(_, error)| error)
}

/// Registers one part outside of the tables `excluded`.
fn register_one(
    mapping: &Mapping,
    tables: &Tables,
    part: Span<Offset>,
    excluded: &[u64],
) -> io::Result<Buffer> {
    let lease = tables.lease(&[part], excluded)?;
    match lease.table.fill(lease.first, mapping.region(), &[part]) {
        Ok(1) => Ok(Buffer::new(part, lease.table, lease.first)),
        Ok(_) => {
            tables.give_back(&lease.table, lease.first, 1, part.len);
            Err(io::ErrorKind::UnexpectedEof.into())
        }
        Err(error) => {
            tables.give_back(&lease.table, lease.first, 1, part.len);
            Err(error)
        }
    }
}

/// Drops buffers, with one call for each stretch of consecutive slots. On an error: how many are
/// dropped.
pub(crate) fn drop_buffers(tables: &Tables, buffers: &[Buffer]) -> Result<(), (usize, UnpinError)> {
    let mut done = 0;
    while let Some(first) = buffers.get(done) {
        let rest = buffers.get(done..).unwrap_or_default();
        let consecutive = (first.slot..)
            .zip(rest)
            .take_while(|(slot, buffer)| buffer.slot == *slot && buffer.table.id == first.table.id)
            .count();
        match first.table.empty(first.slot, consecutive as u32) {
            Ok(emptied @ 1..) => {
                let empty = rest.iter().take(emptied as usize);
                let bytes = empty.map(|buffer| buffer.span.len).sum();
                tables.give_back(&first.table, first.slot, emptied, bytes);
                done += emptied as usize;
            }
            result => {
                let source = result.err().unwrap_or(io::ErrorKind::UnexpectedEof.into());
                let part = first.span;
                return Err((done, UnpinError::Refused { part, source }));
            }
        }
    }
    Ok(())
}
