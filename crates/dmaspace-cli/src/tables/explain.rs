//! One walk, entry by entry, with what each says field by field.

use std::cell::RefCell;

use iopt::walk::{
    Access, BadAddress, Translation, UpperTable, WalkCache, WalkFault, WalkMemory, WalkReason,
};
use serde::Serialize;

use super::fields::{self, Field, Kind};
use super::{Event, Tables, event};
use crate::json::hex;

/// A walk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// The input address.
    #[serde(with = "hex")]
    pub iova: u64,
    /// The entries on the way, from the root down.
    pub steps: Vec<Step>,
    /// Outcome of a read.
    pub read: Outcome,
    /// Outcome of a write.
    pub write: Outcome,
}

/// An entry on the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The level of its table; 0 is that of the smallest page.
    pub level: u8,
    /// The table's address.
    #[serde(with = "hex")]
    pub table: u64,
    /// Its place in the table.
    pub index: u64,
    /// The entry's own address.
    #[serde(with = "hex")]
    pub address: u64,
    /// The entry.
    #[serde(with = "hex")]
    pub word: u64,
    /// Its fields, from bit 0 up; none where it could not be read.
    pub fields: Vec<Field>,
}

/// Outcome of an access.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// It goes on.
    Translated {
        /// To this physical address.
        #[serde(with = "hex")]
        pa: u64,
        /// The page's first input address.
        #[serde(with = "hex")]
        page_iova: u64,
        /// The page's physical address.
        #[serde(with = "hex")]
        page_pa: u64,
        /// The page's bytes.
        page_bytes: u64,
        /// Permissions of all levels together.
        prot: String,
    },
    /// It faults.
    Faults {
        /// Why.
        reason: String,
        /// The level at which the walk ended.
        level: u8,
        /// Report of the unit.
        event: Option<Event>,
    },
}

/// Notes what is read, and the tables that are come to.
struct Noted<'a> {
    tables: &'a Tables<'a>,
    reads: RefCell<Vec<(u64, Option<u64>)>>,
    narrow: bool,
}

impl Noted<'_> {
    fn note(&self, address: u64, word: Option<u64>) {
        self.reads.borrow_mut().push((address, word));
    }
}

impl WalkMemory for Noted<'_> {
    fn read_u64(&self, address: u64) -> Result<u64, BadAddress> {
        let word = self.tables.read_u64(address);
        if !self.narrow {
            self.note(address, word.ok());
        }
        word
    }

    fn read_u32(&self, address: u64) -> Result<u32, BadAddress> {
        let word = self.tables.read_u32(address);
        self.note(address, word.ok().map(u64::from));
        word
    }
}

#[derive(Default)]
struct Came(Vec<UpperTable>);

impl WalkCache for Came {
    fn find(&mut self, _iova: u64) -> Option<UpperTable> {
        None
    }

    fn found(&mut self, table: &UpperTable) {
        self.0.push(*table);
    }
}

/// Walks to `iova`, for a read and for a write.
pub fn explain(tables: &Tables<'_>, iova: u64) -> Explained {
    let (read_steps, read) = walk(tables, iova, Access::Read);
    let (write_steps, write) = walk(tables, iova, Access::Write);
    // Where one is stopped halfway by a permission, the other one's way is shown.
    let steps = if write_steps.len() > read_steps.len() {
        write_steps
    } else {
        read_steps
    };
    let format = tables.root().format;
    Explained {
        iova,
        steps,
        read: outcome(format, read),
        write: outcome(format, write),
    }
}

fn walk(
    tables: &Tables<'_>,
    iova: u64,
    access: Access,
) -> (Vec<Step>, Result<Translation, WalkFault>) {
    let root = tables.root();
    let walker = tables.walker();
    let entry_bytes = walker.entry_bytes().unwrap_or(8);
    let noted = Noted {
        tables,
        reads: RefCell::default(),
        narrow: entry_bytes == 4,
    };
    let mut came = Came::default();
    let found = walker.walk(&noted, iova, access, &mut came);
    let reads = noted.reads.into_inner();
    let count = reads.len();
    let steps = reads.into_iter().enumerate().map(|(nth, (address, word))| {
        let (table, level) = match nth.checked_sub(1) {
            None => (tables.first, root.levels.saturating_sub(1)),
            Some(above) => came
                .0
                .get(above)
                .map_or((0, 0), |table| (table.address, table.level)),
        };
        let kind = if nth + 1 < count {
            Kind::Table
        } else {
            last_kind(&found)
        };
        Step {
            level,
            table,
            index: address.wrapping_sub(table) / entry_bytes,
            address,
            word: word.unwrap_or(0),
            fields: word.map_or(Vec::new(), |word| {
                fields::fields(root.format, level, kind, word)
            }),
        }
    });
    (steps.collect(), found)
}

/// Kind of the last entry of the walk.
fn last_kind(found: &Result<Translation, WalkFault>) -> Kind {
    match found {
        Ok(_) => Kind::Leaf,
        Err(fault) => match fault.reason {
            WalkReason::NotPresent => Kind::Absent,
            WalkReason::NextLevel { .. } | WalkReason::SkippedBits { .. } => Kind::Table,
            _ => Kind::Unknown,
        },
    }
}

fn outcome(format: iopt::FormatId, found: Result<Translation, WalkFault>) -> Outcome {
    match found {
        Ok(found) => Outcome::Translated {
            pa: found.pa,
            page_iova: found.page.iova,
            page_pa: found.page.pa,
            page_bytes: found.page.len,
            prot: found.prot.to_string(),
        },
        Err(fault) => Outcome::Faults {
            reason: fault.to_string(),
            level: fault.level,
            event: event(format, &fault),
        },
    }
}
