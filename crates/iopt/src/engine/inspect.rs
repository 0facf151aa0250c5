//! Checks of tables that were written by other software: whether they are tables of this format, linked
//! as a tree.
//!
//! The engine relies on what it has stored itself. Tables that come from a file, or from a process
//! that is gone, are looked at first, entry by entry: an entry is empty, or a table's as the format
//! writes it, or a leaf's as the format writes it; a group is complete. Bits that hardware sets by
//! itself (accessed and dirty) may have any value.

use runs::{Pa, Span};

use crate::format::{Entry, Format};

/// Damage of one entry of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {index} of the table at {table:#x} (level {level}), {word:#x}: {kind}")]
pub struct Damage {
    /// Address of the table.
    pub table: u64,
    /// Its level.
    pub level: u8,
    /// The entry's place in it.
    pub index: u32,
    /// The entry.
    pub word: u64,
    /// Kind of damage.
    pub kind: DamageKind,
}

/// Kind of damage of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DamageKind {
    /// The format writes no such entry.
    #[error("the format writes no such entry")]
    Unknown,
    /// A leaf beyond the output addresses of the table.
    #[error("a leaf to {output}, beyond {bits} bits")]
    Output {
        /// Where it leads.
        output: Span<Pa>,
        /// Bits of an output address.
        bits: u32,
    },
    /// A leaf that takes several entries, of which not all are there.
    #[error("a leaf of several entries, not all of them there")]
    Group,
    /// It leads to a table where none can be.
    #[error("it leads to {table:#x}, where no table can be")]
    Foreign {
        /// Where it leads.
        table: u64,
    },
    /// It leads to a table to which another entry leads too, or which is above it.
    #[error("it leads to {table:#x}, to which another entry leads")]
    Shared {
        /// Where it leads.
        table: u64,
    },
}

/// Looks at the entries of the table at `table`, whose entry at an index is `word(index)`. `link`
/// is called for each table below.
pub(crate) fn inspect<F: Format, E: From<Damage>>(
    format: &F,
    table: u64,
    level: usize,
    word: impl Fn(usize) -> u64,
    mut link: impl FnMut(usize, u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    let entries = format.entries(level);
    let mut index = 0;
    while index < entries {
        let here = word(index);
        let damage = |kind| Damage {
            table,
            level: level as u8,
            index: index as u32,
            word: here,
            kind,
        };
        match F::decode(level, here) {
            Entry::Empty if here == 0 => index += 1,
            Entry::Empty => return Err(damage(DamageKind::Unknown).into()),
            Entry::Table(below) => {
                // Hardware sets the accessed bit of tables too, in some formats.
                let own = format.table(level, below);
                if level == 0 || (here ^ own) & !F::ACCESSED != 0 {
                    return Err(damage(DamageKind::Unknown).into());
                }
                link(index, here, below)?;
                index += 1;
            }
            Entry::Leaf { pa, log2 } => {
                let output = Span::new(pa, 1 << log2);
                let bits = format.output_bits();
                if (pa | ((1 << log2) - 1)) >> bits.min(63) != 0 {
                    return Err(damage(DamageKind::Output { output, bits }).into());
                }
                if !F::leaf_sizes(level).contains(1 << log2) || !is_own_leaf(format, level, here) {
                    return Err(damage(DamageKind::Unknown).into());
                }
                let group = 1usize << (log2 - F::shift(level));
                let whole = index % group == 0 && index + group <= entries;
                let complete = whole
                    && (0..group).all(|n| {
                        let step = if F::GROUPS_ADVANCE {
                            F::stride(F::shift(level)).wrapping_mul(n as u64)
                        } else {
                            0
                        };
                        (word(index + n) ^ here.wrapping_add(step)) & !F::HARDWARE_BITS == 0
                    });
                if !complete {
                    return Err(damage(DamageKind::Group).into());
                }
                index += group;
            }
        }
    }
    Ok(())
}

/// True when the format writes such a leaf for the permissions that it expresses.
fn is_own_leaf<F: Format>(format: &F, level: usize, word: u64) -> bool {
    let Entry::Leaf { pa, log2 } = F::decode(level, word) else {
        return false;
    };
    format
        .leaf_bits(format.prot(level, word))
        .is_some_and(|bits| {
            let own = F::leaf(level, pa, log2, bits);
            (own ^ word) & !(F::HARDWARE_BITS | F::ACCESSED) == 0
        })
}
