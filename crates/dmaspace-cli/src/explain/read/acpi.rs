//! ACPI tables: binary, and as `acpidump` prints them.
//!
//! Source: ACPICA `source/tools/acpidump/apdump.c` (`ApDumpTableBuffer`, `AcpiUtDumpBufferToFile`).

use dmaspace::firmware::FirmwareTable;

use super::super::facts::{Facts, Known, TableFact, Vendor};
use super::super::finding::{At, Evidence, Place};

/// The longest table that is read.
pub(in crate::explain) const MOST_TABLE: usize = 1 << 20;

/// Signatures of tables that say something about IOMMU units.
const SIGNATURES: [&[u8; 4]; 4] = [b"DMAR", b"IVRS", b"IORT", b"RIMT"];

/// True for the bytes of a table: a signature, and a length that a table can have.
pub(in crate::explain) fn is_table(head: &[u8]) -> bool {
    let signature = head.get(..4).unwrap_or_default();
    let known = SIGNATURES.iter().any(|known| known.as_slice() == signature);
    // Text that begins with such a word has a letter or a blank behind it, a length has small bytes at its end.
    known && head.get(7).is_some_and(|byte| *byte < 0x20) && head.len() >= 36
        || known && head.len() >= 8 && head.get(4..8).is_some_and(|length| length.contains(&0))
}

/// Takes a table.
pub(in crate::explain) fn take(facts: &mut Facts, file: usize, line: Option<u64>, bytes: &[u8]) {
    let table = FirmwareTable::read(bytes);
    let vendor = match table.signature.as_str() {
        "DMAR" => Some(Vendor::Intel),
        "IVRS" => Some(Vendor::Amd),
        "IORT" => Some(Vendor::Arm),
        "RIMT" => Some(Vendor::Riscv),
        _ => None,
    };
    let content = match vendor {
        Some(Vendor::Intel) => "ACPI table DMAR",
        Some(Vendor::Amd) => "ACPI table IVRS",
        Some(Vendor::Arm) => "ACPI table IORT",
        Some(Vendor::Riscv) => "ACPI table RIMT",
        None => return,
    };
    facts.content(file, content);
    let evidence = Evidence {
        place: Place {
            file,
            at: line.map_or(At::Whole, At::Line),
        },
        quote: format!("table {} of {} bytes", table.signature, bytes.len()),
    };
    if let Some(vendor) = vendor {
        let known = Known {
            fact: vendor,
            evidence: evidence.clone(),
        };
        facts.vendors.push(known);
    }
    let fact = TableFact {
        table,
        binary: line.is_none(),
    };
    Facts::push(
        &mut facts.tables,
        &mut facts.dropped,
        "tables",
        fact,
        evidence,
    );
}

/// A table that `acpidump` prints.
#[derive(Debug, Default)]
pub(in crate::explain) struct Hexdump {
    bytes: Vec<u8>,
    line: u64,
}

impl Hexdump {
    /// Takes a line; false: it is none of a dump.
    pub(in crate::explain) fn line(
        &mut self,
        facts: &mut Facts,
        file: usize,
        at: u64,
        text: &str,
    ) -> bool {
        let text = text.trim();
        // DMAR @ 0x0000000000000000
        let heading = text.split_once(" @ 0x").is_some_and(|(name, address)| {
            name.len() == 4 && address.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        if heading {
            self.finish(facts, file);
            self.line = at;
            facts.content(file, "acpidump");
            return true;
        }
        let Some((offset, rest)) = text.split_once(": ").filter(|_| self.line != 0) else {
            return false;
        };
        let offset = usize::from_str_radix(offset, 16).ok();
        if offset != Some(self.bytes.len()) || self.bytes.len() >= MOST_TABLE {
            return false;
        }
        // Sixteen bytes, then the same as text.
        let words = rest.split(' ').take(16);
        let bytes = words.map_while(|word| {
            u8::from_str_radix(word, 16)
                .ok()
                .filter(|_| word.len() == 2)
        });
        self.bytes.extend(bytes);
        true
    }

    /// Ends the table that is open.
    pub(in crate::explain) fn finish(&mut self, facts: &mut Facts, file: usize) {
        if !self.bytes.is_empty() {
            take(facts, file, Some(self.line), &self.bytes);
        }
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_is_the_table() {
        let text = "DMAR @ 0x0000000000000000\n\
            \x20   0000: 44 4D 41 52 30 00 00 00 01 00 4F 45 4D 49 44 20  DMAR0.....OEMID \n\
            \x20   0010: 4F 45 4D 54 41 42 4C 45 01 00 00 00 54 45 53 54  OEMTABLE....TEST\n\
            \x20   0020: 01 00 00 00 2D 01 00 00 00 00 00 00 00 00 00 00  ....-...........\n";
        let (mut facts, mut dump) = (Facts::default(), Hexdump::default());
        for (at, line) in (1..).zip(text.lines()) {
            assert!(dump.line(&mut facts, 0, at, line), "{line}");
        }
        dump.finish(&mut facts, 0);
        assert_eq!(facts.tables[0].fact.table.signature, "DMAR");
        assert_eq!(facts.vendors[0].fact, Vendor::Intel);
    }

    #[test]
    fn tables_are_told_from_text() {
        assert!(is_table(b"DMAR\x60\0\0\0\x01 and more"));
        assert!(!is_table(b"DMAR: DRHD: handling fault status reg 2"));
        assert!(!is_table(b"DMAR @ 0x0000000000000000"));
    }
}
