//! Writing an image.

use super::crc::Crc;
use super::{CHECKSUM, HEADER, MAGIC, RECORD, VERSION, encode_above, encode_encryption};
use crate::cell::Cell;
use crate::engine::Table;
use crate::format::{Format, Root};
use crate::memory::TableMemory;

/// How many tables are put in order at once.
const WINDOW: usize = 1024;

/// Passes bytes on and adds them up.
struct Out<'a, S> {
    sink: &'a mut S,
    crc: Crc,
    bytes: u64,
}

impl<S, E> Out<'_, S>
where
    S: FnMut(&[u8]) -> Result<(), E>,
{
    fn put(&mut self, bytes: &[u8]) -> Result<(), E> {
        self.crc.add(bytes);
        self.bytes += bytes.len() as u64;
        (self.sink)(bytes)
    }

    fn entries<C: Cell>(&mut self, cells: &[C]) -> Result<(), E> {
        // In pieces of a size that a stack has room for.
        for piece in cells.chunks(32) {
            let mut bytes = [0; 32 * 8];
            for (to, cell) in bytes.chunks_mut(C::BYTES).zip(piece) {
                let word = cell.get_acquire().to_le_bytes();
                to.copy_from_slice(word.get(..C::BYTES).unwrap_or(&word));
            }
            self.put(bytes.get(..piece.len() * C::BYTES).unwrap_or(&[]))?;
        }
        Ok(())
    }
}

impl<F: Format, M: TableMemory> Table<F, M> {
    /// Writes an [`image`](crate::image) of the table: `sink` gets its bytes in pieces, in order.
    /// Returns how many they were.
    ///
    /// Units may go on walking meanwhile; accessed and dirty bits that they set are in the image or
    /// not.
    ///
    /// ```
    /// # use iopt::format::VtdSs;
    /// # use iopt::{HeapTables, Prot, Table, TableOps as _, image::Image};
    /// # use runs::Span;
    /// # let tables = HeapTables::with_tables(1024)?;
    /// # let mut table = Table::new(VtdSs::new(4)?, &tables)?;
    /// # table.map(0, &[Span::new(1 << 30, 8192)], Prot::RW)?;
    /// let mut file = Vec::new();
    /// table.write_image(&mut |bytes: &[u8]| std::io::Write::write_all(&mut file, bytes))?;
    ///
    /// let image = Image::parse(&file)?;
    /// let copy = image.restore(VtdSs::new(4)?, &tables)?;
    /// assert_eq!(copy.translate(4096), Some((1 << 30) + 4096));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn write_image<E>(&self, sink: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<u64, E> {
        let format = self.format();
        let root = Root {
            address: self.begin().root,
            ..self.root()
        };
        let mut tables = 0u64;
        self.for_each_table(&mut |table, _| tables += u64::from(table != root.address));

        let root_bytes = Self::root_bytes(&format);
        let table_bytes = F::TABLE_BYTES as usize;
        let total =
            (HEADER + root_bytes + CHECKSUM) as u64 + tables * (RECORD + table_bytes) as u64;
        let mut out = Out {
            sink,
            crc: Crc::new(),
            bytes: 0,
        };

        let aperture = format.aperture();
        out.put(MAGIC)?;
        out.put(&VERSION.to_le_bytes())?;
        out.put(&(HEADER as u32).to_le_bytes())?;
        out.put(&total.to_le_bytes())?;
        out.put(&root.format.to_bytes())?;
        out.put(&[
            root.levels,
            F::ENTRY_BYTES as u8,
            format.output_bits() as u8,
            aperture.bits as u8,
            encode_above(aperture.above),
            encode_encryption(&format),
            0,
            0,
        ])?;
        out.put(&self.page_sizes().bits().to_le_bytes())?;
        out.put(&root.address.to_le_bytes())?;
        out.put(&(root_bytes as u32).to_le_bytes())?;
        out.put(&(table_bytes as u32).to_le_bytes())?;
        out.put(&tables.to_le_bytes())?;
        out.put(&[0; 8])?;

        let top = usize::from(root.levels) - 1;
        out.entries(self.memory.entries(root.address, format.entries(top)))?;
        self.write_tables(&mut out)?;
        let crc = out.crc.value().to_le_bytes();
        out.put(&crc)?;
        Ok(out.bytes)
    }

    /// The tables below the root, by ascending address: a window of them at a time, so that no
    /// memory is needed to sort them.
    fn write_tables<S, E>(&self, out: &mut Out<'_, S>) -> Result<(), E>
    where
        S: FnMut(&[u8]) -> Result<(), E>,
    {
        let root = self.begin().root;
        let mut next = Some(0u64);
        while let Some(from) = next {
            let mut lowest = None;
            self.for_each_table(&mut |table, _| {
                if table >= from && table != root && lowest.is_none_or(|low| table < low) {
                    lowest = Some(table);
                }
            });
            let Some(start) = lowest else { break };
            // Level + 1; 0 where there is no table.
            let mut levels = [0u8; WINDOW];
            self.for_each_table(&mut |table, level| {
                if table == root {
                    return;
                }
                let place = table.checked_sub(start).map(|bytes| bytes / F::TABLE_BYTES);
                let place = place.and_then(|place| usize::try_from(place).ok());
                if let Some(slot) = place.and_then(|place| levels.get_mut(place)) {
                    *slot = level + 1;
                }
            });
            for (place, level) in levels.iter().enumerate() {
                let Some(level) = level.checked_sub(1) else {
                    continue;
                };
                let table = start + place as u64 * F::TABLE_BYTES;
                out.put(&table.to_le_bytes())?;
                out.put(&[level, 0, 0, 0, 0, 0, 0, 0])?;
                out.entries(self.entries(table, level.into()))?;
            }
            next = start.checked_add(WINDOW as u64 * F::TABLE_BYTES);
        }
        Ok(())
    }
}
