//! Reading an image.

use runs::PageSizes;

use super::crc::Crc;
use super::{
    CHECKSUM, HEADER, ImageError, MAGIC, RECORD, VERSION, encode_above, encode_encryption,
};
use crate::engine::{Damage, DamageKind, inspect};
use crate::error::BuildError;
use crate::format::{
    AmdV1, ArmConfig, ArmGranule, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K, Dart2,
    DartVersion, Format, FormatId, Granule, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG,
    Root, VtdSs, X86_64,
};
use crate::walk::{BadAddress, WalkMemory};

/// An image in memory whose bytes are those that were written.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    root: Root,
    sizes: PageSizes,
    entry_bytes: u8,
    output_bits: u8,
    input_bits: u8,
    above: u8,
    encryption: u8,
    table_bytes: u32,
    root_entries: &'a [u8],
    /// The other tables, each behind its [`RECORD`].
    records: &'a [u8],
}

/// One table of an image.
#[derive(Clone, Copy)]
pub(crate) struct TableImage<'a> {
    /// Where it lay.
    pub(crate) address: u64,
    pub(crate) level: u8,
    entries: &'a [u8],
    entry_bytes: u8,
}

impl TableImage<'_> {
    /// The entry at an index; 0 behind the end.
    pub(crate) fn word(&self, index: usize) -> u64 {
        let bytes = usize::from(self.entry_bytes);
        self.entries
            .get(index * bytes..(index + 1) * bytes)
            .map_or(0, number)
    }

    /// Bytes of the table.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Entries of the table.
    pub(crate) fn count(&self) -> usize {
        self.entries.len() / usize::from(self.entry_bytes)
    }
}

/// A little-endian number of up to 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl<'a> Image<'a> {
    /// Looks at everything that does not depend on the entries: magic, version, length, checksum, that the
    /// header's fields are those of its format, and that the tables are in order.
    pub fn parse(file: &'a [u8]) -> Result<Self, ImageError> {
        let field = |offset: usize, bytes: usize| {
            file.get(offset..offset + bytes).ok_or(ImageError::Length {
                said: (HEADER + CHECKSUM) as u64,
                there: file.len() as u64,
            })
        };
        if field(0, 8)? != MAGIC {
            return Err(ImageError::Magic);
        }
        let version = number(field(8, 4)?) as u32;
        if version != VERSION {
            return Err(ImageError::Version(version));
        }
        let said = number(field(16, 8)?);
        if said != file.len() as u64 || file.len() < HEADER + CHECKSUM {
            let there = file.len() as u64;
            return Err(ImageError::Length { said, there });
        }
        let (content, checksum) = file.split_at(file.len() - CHECKSUM);
        let mut crc = Crc::new();
        crc.add(content);
        let (said, found) = (number(checksum) as u32, crc.value());
        if said != found {
            return Err(ImageError::Checksum { said, found });
        }

        let header = |ok: bool, field: &'static str| {
            if ok {
                Ok(())
            } else {
                Err(ImageError::Header { field })
            }
        };
        header(number(field(12, 4)?) == HEADER as u64, "its length")?;
        let byte = |offset: usize| field(offset, 1).map(|bytes| number(bytes) as u8);
        let mut format = [0; 8];
        format.copy_from_slice(field(24, 8)?);
        let Some(format) = FormatId::from_bytes(format) else {
            return Err(ImageError::Header { field: "format" });
        };
        let root = Root {
            format,
            address: number(field(48, 8)?),
            levels: byte(32)?,
        };
        let (entry_bytes, root_bytes) = (byte(33)?, number(field(56, 4)?));
        let table_bytes = number(field(60, 4)?);
        header(matches!(root.levels, 1..=6), "levels")?;
        header(matches!(entry_bytes, 4 | 8), "bytes of an entry")?;
        header(byte(37)? < 64, "bit of encryption")?;
        header(
            number(field(38, 2)?) | number(field(72, 8)?) == 0,
            "reserved bytes",
        )?;
        let whole = |bytes: u64| bytes.is_power_of_two() && bytes >= u64::from(entry_bytes);
        header(whole(root_bytes), "bytes of the root")?;
        header(whole(table_bytes), "bytes of a table")?;
        let end = HEADER as u64 + root_bytes;
        header(end <= content.len() as u64, "bytes of the root")?;
        let (start, records) = content.split_at(end as usize);
        let each = RECORD as u64 + table_bytes;
        let all = number(field(64, 8)?).checked_mul(each);
        header(all == Some(records.len() as u64), "number of tables")?;

        let image = Self {
            root,
            sizes: PageSizes::from_bits(number(field(40, 8)?)),
            entry_bytes,
            output_bits: byte(34)?,
            input_bits: byte(35)?,
            above: byte(36)?,
            encryption: byte(37)?,
            table_bytes: table_bytes as u32,
            root_entries: start.get(HEADER..).unwrap_or(&[]),
            records,
        };
        image.check_header()?;
        image.check_order()?;
        Ok(image)
    }

    /// There are tables of the format with what the header says of them.
    fn check_header(&self) -> Result<(), ImageError> {
        let levels = self.root.levels;
        match self.root.format {
            FormatId::AmdV1 => {
                let plain = AmdV1::new(levels)?;
                match self.encryption_bit() {
                    Some(bit) => self.check_configuration(&plain.with_encrypted_tables(bit)?),
                    None => self.check_configuration(&plain),
                }
            }
            FormatId::X86_64 => {
                let plain = X86_64::new(levels)?;
                match self.encryption_bit() {
                    Some(bit) => self.check_configuration(&plain.with_encrypted_tables(bit)?),
                    None => self.check_configuration(&plain),
                }
            }
            FormatId::VtdSs => self.check_configuration(&VtdSs::new(levels)?),
            FormatId::ArmStage1(arm) => match arm.granule {
                ArmGranule::K4 => self.check_stage1::<K4>(arm),
                ArmGranule::K4Lpa2 => self.check_stage1::<K4Lpa2>(arm),
                ArmGranule::K16 => self.check_stage1::<K16>(arm),
                ArmGranule::K16Lpa2 => self.check_stage1::<K16Lpa2>(arm),
                ArmGranule::K64 => self.check_stage1::<K64>(arm),
                ArmGranule::K64Lpa => self.check_stage1::<K64Lpa>(arm),
            },
            FormatId::ArmStage2(arm) => match arm.granule {
                ArmGranule::K4 => self.check_stage2::<K4>(arm),
                ArmGranule::K4Lpa2 => self.check_stage2::<K4Lpa2>(arm),
                ArmGranule::K16 => self.check_stage2::<K16>(arm),
                ArmGranule::K16Lpa2 => self.check_stage2::<K16Lpa2>(arm),
                ArmGranule::K64 => self.check_stage2::<K64>(arm),
                ArmGranule::K64Lpa => self.check_stage2::<K64Lpa>(arm),
            },
            FormatId::ArmV7s => self.check_configuration(&<ArmV7s>::new()),
            FormatId::RiscV => self.check_configuration(&RiscV::new(levels)?),
            FormatId::RiscVG => self.check_configuration(&RiscVG::new(levels)?),
            FormatId::Dart(dart) => match (dart.version, dart.page_log2) {
                (DartVersion::V1, 12) => {
                    self.check_configuration(&Dart1Page4K::new(levels, dart.input_bits)?)
                }
                (DartVersion::V1, _) => {
                    self.check_configuration(&Dart1::new(levels, dart.input_bits)?)
                }
                (DartVersion::V2, _) => {
                    self.check_configuration(&Dart2::new(levels, dart.input_bits)?)
                }
            },
        }
    }

    fn check_stage1<G: Granule>(&self, arm: ArmConfig) -> Result<(), ImageError> {
        let lower = ArmStage1::<G>::new(arm.input_bits.into(), self.output_bits.into())?;
        self.check_configuration(&if arm.upper { lower.upper() } else { lower })
    }

    fn check_stage2<G: Granule>(&self, arm: ArmConfig) -> Result<(), ImageError> {
        let format = ArmStage2::<G>::new(arm.input_bits.into(), self.output_bits.into())?;
        self.check_configuration(&format.with_levels(self.root.levels)?)
    }

    /// The tables below the root ascend, do not overlap each other or the root, and are aligned.
    fn check_order(&self) -> Result<(), ImageError> {
        let table_bytes = u64::from(self.table_bytes);
        let root = (self.root.address, self.root_entries.len() as u64);
        let mut free = 0u64;
        if root.0.checked_add(root.1).is_none() || root.0 & (root.1 - 1) != 0 {
            return Err(ImageError::Address { table: root.0 });
        }
        for (table, zeroes) in self.tables() {
            let address = table.address;
            let end = address.checked_add(table_bytes);
            let apart = end.is_some_and(|end| end <= root.0) || address >= root.0 + root.1;
            let below = table.level < self.root.levels - 1;
            match end {
                Some(end)
                    if address >= free
                        && apart
                        && below
                        && zeroes
                        && address & (table_bytes - 1) == 0 =>
                {
                    free = end;
                }
                _ => return Err(ImageError::Address { table: address }),
            }
        }
        Ok(())
    }

    /// The root from which a unit walks the tables where they lay.
    pub const fn root(&self) -> Root {
        let mut root = self.root;
        if let Some(bit) = self.encryption_bit() {
            root.address |= 1 << bit;
        }
        root
    }

    /// The bit that marks addresses of tables as encrypted, in the root and in entries: what a
    /// [`Walker`](crate::walk::Walker::with_encryption_bit) needs.
    pub const fn encryption_bit(&self) -> Option<u32> {
        match self.encryption {
            0 => None,
            bit => Some(bit as u32),
        }
    }

    /// The sizes of leaves that the table used.
    pub const fn page_sizes(&self) -> PageSizes {
        self.sizes
    }

    /// How many tables it holds, the root among them.
    pub const fn len(&self) -> usize {
        1 + self.below_root()
    }

    /// Always false: there is a root.
    pub const fn is_empty(&self) -> bool {
        false
    }

    const fn below_root(&self) -> usize {
        self.records.len() / (RECORD + self.table_bytes as usize)
    }

    /// Looks at everything that depends on the format: that the tables are of this one, configured
    /// like this, that the format writes such entries, and that each table is linked exactly once.
    pub fn check<F: Format>(&self, format: &F) -> Result<(), ImageError> {
        self.check_configuration(format)?;
        self.check_links(format)
    }

    /// The header's fields are those of this format, configured like this.
    fn check_configuration<F: Format>(&self, format: &F) -> Result<(), ImageError> {
        let expected = format.id();
        if self.root.format != expected {
            let found = self.root.format;
            return Err(ImageError::Format { found, expected });
        }
        let aperture = format.aperture();
        let top = usize::from(format.levels()) - 1;
        let root_bytes = format.entries(top) * F::ENTRY_BYTES;
        for (what, found, expected) in [
            ("levels", self.root.levels.into(), format.levels().into()),
            (
                "bytes of an entry",
                self.entry_bytes.into(),
                F::ENTRY_BYTES as u64,
            ),
            (
                "bytes of the root",
                self.root_entries.len() as u64,
                root_bytes as u64,
            ),
            ("bytes of a table", self.table_bytes.into(), F::TABLE_BYTES),
            (
                "output bits",
                self.output_bits.into(),
                format.output_bits().into(),
            ),
            ("input bits", self.input_bits.into(), aperture.bits.into()),
            (
                "upper input bits",
                self.above.into(),
                encode_above(aperture.above).into(),
            ),
            (
                "bit of encryption",
                self.encryption.into(),
                encode_encryption(format).into(),
            ),
        ] {
            if found != expected {
                return Err(ImageError::Configuration {
                    what,
                    found,
                    expected,
                });
            }
        }
        let offered = F::page_sizes(format.levels());
        if self.sizes.is_empty() || self.sizes.and(offered) != self.sizes {
            let wanted = self.sizes;
            return Err(BuildError::PageSizes { wanted, offered }.into());
        }
        Ok(())
    }

    /// The links, as many tables at a time as there are bits on the stack. There are no more links
    /// than tables below the root, each leads one level down, and each table has one: a tree.
    fn check_links<F: Format>(&self, format: &F) -> Result<(), ImageError> {
        const AT_ONCE: usize = 4096;
        let mut from = 0;
        loop {
            let mut linked = [0u64; AT_ONCE / 64];
            let every = core::iter::once(self.root_table());
            for table in every.chain(self.tables().map(|(table, _)| table)) {
                let level = usize::from(table.level);
                // Leaves are looked at once.
                if level == 0 && from > 0 {
                    continue;
                }
                let word = |index| table.word(index);
                inspect::<F, ImageError>(
                    format,
                    table.address,
                    level,
                    word,
                    |index, word, below| {
                        let damage = |kind| Damage {
                            table: table.address,
                            level: table.level,
                            index: index as u32,
                            word,
                            kind,
                        };
                        let found = self.find(below).filter(|(_, there)| {
                            there.address == below && there.level + 1 == table.level
                        });
                        let Some((place, _)) = found else {
                            return Err(damage(DamageKind::Foreign { table: below }).into());
                        };
                        let Some(place) = place.checked_sub(from) else {
                            return Ok(());
                        };
                        if let Some(bits) = linked.get_mut(place / 64) {
                            if *bits >> (place % 64) & 1 == 1 {
                                return Err(damage(DamageKind::Shared { table: below }).into());
                            }
                            *bits |= 1 << (place % 64);
                        }
                        Ok(())
                    },
                )?;
            }
            for (n, (table, _)) in self.tables().enumerate().skip(from).take(AT_ONCE) {
                let bits = linked.get((n - from) / 64).copied().unwrap_or(0);
                if bits >> ((n - from) % 64) & 1 == 0 {
                    return Err(ImageError::Unlinked {
                        table: table.address,
                    });
                }
            }
            from += AT_ONCE;
            if from >= self.below_root() {
                return Ok(());
            }
        }
    }

    pub(crate) const fn root_table(&self) -> TableImage<'a> {
        TableImage {
            address: self.root.address,
            level: self.root.levels - 1,
            entries: self.root_entries,
            entry_bytes: self.entry_bytes,
        }
    }

    /// The tables below the root, ascending, and whether their records' reserved bytes are zero.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (TableImage<'a>, bool)> + use<'a> {
        let entry_bytes = self.entry_bytes;
        self.records
            .chunks_exact(RECORD + self.table_bytes as usize)
            .map(move |record| table_in(record, entry_bytes))
    }

    /// The table in which `address` lies, and its place among those below the root.
    pub(crate) fn find(&self, address: u64) -> Option<(usize, TableImage<'a>)> {
        let each = RECORD + self.table_bytes as usize;
        let record = |n: usize| self.records.get(n * each..(n + 1) * each);
        let (mut low, mut high) = (0, self.below_root());
        while low < high {
            let middle = low + (high - low) / 2;
            let (table, _) = table_in(record(middle)?, self.entry_bytes);
            if address < table.address {
                high = middle;
            } else if address - table.address >= table.bytes() {
                low = middle + 1;
            } else {
                return Some((middle, table));
            }
        }
        None
    }
}

fn table_in(record: &[u8], entry_bytes: u8) -> (TableImage<'_>, bool) {
    let (head, entries) = record.split_at(RECORD.min(record.len()));
    let table = TableImage {
        address: head.get(..8).map_or(0, number),
        level: head.get(8).copied().unwrap_or(0),
        entries,
        entry_bytes,
    };
    (table, head.get(9..).map_or(0, number) == 0)
}

impl core::fmt::Debug for Image<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Image")
            .field("root", &self.root)
            .field("sizes", &self.sizes)
            .field("tables", &self.len())
            .finish_non_exhaustive()
    }
}

/// The tables lie where they lay when the image was made.
impl WalkMemory for Image<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let bad = BadAddress { address };
        if self.entry_bytes != 8 || address % 8 != 0 {
            return Err(bad);
        }
        self.read(address).ok_or(bad)
    }

    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        let bad = BadAddress { address };
        if address % 4 != 0 {
            return Err(bad);
        }
        let half = if self.entry_bytes == 8 {
            address & 4
        } else {
            0
        };
        let word = self.read(address - half).ok_or(bad)?;
        Ok((word >> (8 * half)) as u32)
    }
}

impl Image<'_> {
    fn read(&self, address: u64) -> Option<u64> {
        let root = self.root_table();
        let table = match address.checked_sub(root.address) {
            Some(offset) if offset < root.bytes() => root,
            _ => self.find(address)?.1,
        };
        let offset = address - table.address;
        Some(table.word((offset / u64::from(self.entry_bytes)) as usize))
    }
}
