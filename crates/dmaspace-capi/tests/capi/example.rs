//! C itself: the example compiles without a warning, runs, and leaves nothing; C++ reads the header.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn output(command: &mut Command) -> Output {
    let output = command.output();
    let output = output.unwrap_or_else(|cause| panic!("{command:?}: {cause}"));
    let (out, err) = (&output.stdout, &output.stderr);
    let (out, err) = (String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{out}{err}",
        output.status
    );
    output
}

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where Cargo has put the library that this test is linked with.
fn libraries() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .to_owned()
}

#[test]
fn the_c_example_compiles_without_a_warning_and_does_what_it_says() {
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("map");
    let libraries = libraries();
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o"])
        .arg(&program);
    gcc.arg("-I").arg(package().join("include"));
    gcc.arg(package().join("../../examples/c/map.c"));
    gcc.arg("-L").arg(&libraries).arg("-ldmaspace_capi");
    gcc.arg(format!("-Wl,-rpath,{}", libraries.display()));
    output(&mut gcc);
    let said = output(&mut Command::new(&program)).stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("vtd-ss") && said.contains("dart2"), "{said}");
    assert!(said.ends_with("everything was given back\n"), "{said}");
}

#[test]
fn cpp_reads_the_header() {
    let mut gpp = Command::new("g++");
    gpp.args([
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        "-x",
        "c++",
    ]);
    let header = package().join("include/dmaspace.h");
    if Command::new("g++").arg("--version").output().is_err() {
        println!("there is no g++ here");
        return;
    }
    output(gpp.arg(header));
}
