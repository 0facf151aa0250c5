//! Writes an image of tables of this process as they are now, for `dmaspace tables`:
//!
//! ```text
//! cargo run -p dmaspace-iopt --example live_tables -- tables.img
//! ```

use std::error::Error;
use std::sync::Arc;
use std::{env, fs};

use iopt::{AnyTable, FormatId, HeapTables, Prot};
use runs::{PageSizes, Span};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    // A domain of an address space has such a table, too: see `Ioas::tables`.
    let memory = Arc::new(HeapTables::with_tables(64)?);
    let sizes = PageSizes::from_bits(1 << 12 | 1 << 21 | 1 << 30);
    let table = AnyTable::new(FormatId::VtdSs, 4, sizes, memory.clone())?;
    for (iova, address, bytes, prot) in [
        (GIB, 4 * GIB, GIB, Prot::RW),
        (2 * GIB, 6 * GIB, 256 * MIB, Prot::RW),
        (2 * GIB + 256 * MIB, 8 * GIB + 4096, 8 * MIB, Prot::RW),
        (3 * GIB, 12 * GIB, 64 << 10, Prot::READ),
    ] {
        table.map(iova, &[Span::new(address, bytes)], prot)?;
    }

    // Units may go on walking them meanwhile.
    let mut image = Vec::new();
    table.write_image(&mut |bytes: &[u8]| {
        image.extend_from_slice(bytes);
        Ok::<_, std::io::Error>(())
    })?;
    println!("{} bytes of image", image.len());
    if let Some(file) = env::args_os().nth(1) {
        fs::write(file, image)?;
    }
    Ok(())
}
