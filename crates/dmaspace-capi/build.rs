//! Gives the shared library a SONAME when it is built to be installed (`cargo xtask install`): beside its own file name a
//! program would not find it.

use std::env;

const SONAME: &str = "DMASPACE_SONAME";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={SONAME}");
    if let Ok(soname) = env::var(SONAME) {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
    }
}
