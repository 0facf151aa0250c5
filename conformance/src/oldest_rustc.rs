//! The oldest Rust compiler that is supported, Debian 13's, unpacked beside the system with a C library of its own.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::apt;

/// The compiler's version is that of `rust-version` in the workspace's Cargo.toml.
const RELEASE: &str = "trixie";

/// A program `rustc` in `directory`, fetched if it is not there: 160 MB.
///
/// # Errors
///
/// When it cannot be fetched, unpacked or written.
pub fn fetch(directory: &Path) -> anyhow::Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let directory = directory.canonicalize()?;
    let root = directory.join(RELEASE);
    apt::fetch_into(&root, "rustc", &[RELEASE])?;
    // Cargo takes a single path. What the compiler starts, the linker first, has the machine's own libraries.
    let script = format!(
        r#"#!/bin/sh
root='{}'
libraries=$root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$root/usr/bin/rustc" --sysroot "$root/usr" "$@"
"#,
        root.display()
    );
    let program = directory.join("rustc");
    fs::write(&program, script)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok(program)
}
