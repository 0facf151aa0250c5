//! Names the shared library by what programs that are linked to it depend on: before 1.0 each minor version.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of = |name: &str| env::var(name).unwrap_or_default();
    if of("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    let compatible = match of("CARGO_PKG_VERSION_MAJOR") {
        major if major == "0" => format!("0.{}", of("CARGO_PKG_VERSION_MINOR")),
        major => major,
    };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libdmaspace_capi.so.{compatible}");
}
