//! The program brings its own start and needs no C library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let arguments = [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        // The toolchain's `core` was built to unwind and names the function that would do it.
        // Here a panic ends the process, and nothing calls that function.
        "-Wl,--defsym=rust_eh_personality=0",
    ];
    for argument in arguments {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
