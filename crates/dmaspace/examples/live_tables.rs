//! Looks at tables of this process as they are now, and writes an image of them for `dmaspace tables`:
//!
//! ```text
//! cargo run -p dmaspace --example live_tables -- tables.img
//! ```

use std::error::Error;
use std::{env, fs};

use dmaspace::iopt::{AnyTable, FormatId, HeapTables, Prot};
use dmaspace::runs::{PageSizes, Span};
use dmaspace::tables::{Limits, TableFile, explain, survey};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    // A domain of an address space has such a table, too: `Ioas::domains` yields them.
    let memory = HeapTables::with_tables(64)?;
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let mut table = AnyTable::new(FormatId::VtdSs, 4, sizes, &memory)?;
    for (iova, address, bytes, prot) in [
        (GIB, 4 * GIB, GIB, Prot::RW),
        (2 * GIB, 6 * GIB, 256 * MIB, Prot::RW),
        (2 * GIB + 256 * MIB, 8 * GIB + 4096, 8 * MIB, Prot::RW),
        (3 * GIB, 12 * GIB, 64 << 10, Prot::READ),
    ] {
        table.map(iova, &[Span::new(address, bytes)], prot)?;
    }

    let live = TableFile::of_table("this process", &table);
    let found = survey(&live.tables()?, Limits::default());
    println!("leaves by size: {:?}", found.leaves);
    println!("{:?}", explain(&live.tables()?, 3 * GIB).write);

    if let Some(file) = env::args_os().nth(1) {
        let mut image = Vec::new();
        table.write_image(&mut |bytes: &[u8]| {
            image.extend_from_slice(bytes);
            Ok::<_, std::io::Error>(())
        })?;
        fs::write(file, image)?;
    }
    Ok(())
}
