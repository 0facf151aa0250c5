//! Building tables from an image, wherever there is room for them.

use super::parse::TableImage;
use super::{Image, ImageError};
use crate::cell::Cell;
use crate::engine::trust::set_aside;
use crate::engine::{Damage, DamageKind, Table, inspect};
use crate::error::BuildError;
use crate::format::{Entry, Format};
use crate::memory::{Reserve, TableMemory};

impl Image<'_> {
    /// Builds the table anew in `memory`: the same leaves, with their accessed and dirty bits, in
    /// tables at other addresses. Everything is checked first; on an error nothing is built.
    pub fn restore<F: Format, M: TableMemory>(
        &self,
        format: F,
        memory: M,
    ) -> Result<Table<F, M>, ImageError> {
        self.check(&format)?;
        let mut table = Table::with_page_sizes(format, memory, self.page_sizes())?;
        let below = self.len() as u64 - 1;
        let done = match set_aside(&table.memory, below) {
            Ok(mut reserve) => {
                let root = table.begin().root;
                let done = table.copy(self, &self.root_table(), root, &mut reserve);
                table.memory.give_back(reserve);
                table.look_for_empty_tables();
                done.and_then(|()| Ok(table.intact().map_err(BuildError::from)?))
            }
            Err(cause) => Err(ImageError::Build(cause.into())),
        };
        if let Err(cause) = done {
            let (gather, memory) = table.tear_down();
            memory.reclaim(gather.never_walked().into_tables());
            return Err(cause);
        }
        table.count(below, 0);
        table.announce_all();
        Ok(table)
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Fills the table at `to` as `from` was, and new tables below it. Each is complete before it is
    /// linked.
    fn copy(
        &self,
        image: &Image<'_>,
        from: &TableImage<'_>,
        to: u64,
        reserve: &mut Reserve,
    ) -> Result<(), ImageError> {
        let level = usize::from(from.level);
        let cells = self.entries(to, level);
        inspect::<F, ImageError>(
            &self.format,
            from.address,
            level,
            |index| from.word(index),
            |index, word, below| {
                let damage = |kind| Damage {
                    table: from.address,
                    level: from.level,
                    index: index as u32,
                    word,
                    kind,
                };
                let (Some((_, there)), Some(cell)) = (image.find(below), cells.get(index)) else {
                    return Err(damage(DamageKind::Foreign { table: below }).into());
                };
                let Some((new, _)) = reserve.take(&self.memory) else {
                    return Err(damage(DamageKind::Shared { table: below }).into());
                };
                self.copy(image, &there, new, reserve)?;
                // Bits that hardware has set in the link stay set.
                let own = self.format.table(level, below);
                cell.set_release(self.format.table(level, new) | (word & !own));
                Ok(())
            },
        )?;
        for (index, cell) in cells.iter().enumerate() {
            let word = from.word(index);
            if !matches!(F::decode(level, word), Entry::Table(_)) {
                cell.set(word);
            }
        }
        self.memory.written(cells);
        Ok(())
    }
}
