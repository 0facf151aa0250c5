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

/// A C example, compiled without a warning into `scratch`.
fn compiled(name: &str, scratch: &Path) -> PathBuf {
    let program = scratch.join(name);
    let libraries = libraries();
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o"])
        .arg(&program);
    gcc.arg("-I").arg(package().join("include"));
    let source = format!("../../examples/c/{name}.c");
    gcc.arg(package().join(source));
    gcc.arg("-L").arg(&libraries).arg("-ldmaspace_capi");
    gcc.arg(format!("-Wl,-rpath,{}", libraries.display()));
    output(&mut gcc);
    program
}

#[test]
fn the_c_example_compiles_without_a_warning_and_does_what_it_says() {
    let scratch = tempfile::tempdir().unwrap();
    let program = compiled("map", scratch.path());
    let said = output(&mut Command::new(&program)).stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("vtd-ss") && said.contains("dart2"), "{said}");
    assert!(said.ends_with("everything was given back\n"), "{said}");
}

/// It checks each answer against a plain table. The times that it prints are no part of the test.
#[test]
fn the_c_example_for_registered_memory_agrees_with_a_plain_table() {
    let scratch = tempfile::tempdir().unwrap();
    let program = compiled("register", scratch.path());
    let said = output(Command::new(&program).arg("2000")).stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(said.starts_with("2000 regions"), "{said}");
    assert!(said.ends_with("everything was given back\n"), "{said}");
    let refused = Command::new(&program).arg("1").output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
}

/// What it does with a device is shown in the guests: `iommufd_serves_a_c_program` and its like.
#[test]
fn the_c_example_for_devices_says_what_is_missing() {
    let scratch = tempfile::tempdir().unwrap();
    let program = compiled("vfio", scratch.path());
    let none = Command::new(&program).output().unwrap();
    let usage = String::from_utf8(none.stderr).unwrap();
    assert!(usage.contains("vfio iommufd NODE"), "{usage}");
    assert_eq!(none.status.code(), Some(2));
    // Whether or not this machine has VFIO, it has no such device.
    let nothing = scratch.path().join("nothing");
    for way in [vec!["iommufd"], vec!["type1"]] {
        let mut run = Command::new(&program);
        run.args(&way).arg(&nothing);
        if way == ["type1"] {
            run.arg("0000:00:00.0");
        }
        let failed = run.output().unwrap();
        let why = String::from_utf8(failed.stderr).unwrap();
        assert!(why.contains("No such file or directory"), "{why}");
        assert_eq!(failed.status.code(), Some(1), "{why}");
    }
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
