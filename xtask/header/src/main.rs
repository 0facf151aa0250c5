//! Prints the header of the C interface: `header DIRECTORY`, the one of `dmaspace-capi`.

use std::error::Error;
use std::path::PathBuf;
use std::{env, io};

use cbindgen::{Builder, Config};

fn main() -> Result<(), Box<dyn Error>> {
    let directory: PathBuf = env::args_os().nth(1).ok_or("which directory?")?.into();
    let config = Config::from_file(directory.join("cbindgen.toml"))?;
    // By its root: of the crate as a whole it would ask Cargo for all others.
    let builder = Builder::new().with_src(directory.join("src/lib.rs"));
    let bindings = builder.with_config(config).generate()?;
    bindings.write(io::stdout());
    Ok(())
}
