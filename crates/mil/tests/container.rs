//! Folders that are no packages, and packages that reach out of their folder.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::{Path, PathBuf};

use kvbaton_mil::{Manifest, MilError, Package};
use tempfile::TempDir;

const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";

/// A copy of `testdata/spec7.mlpackage` to spoil.
struct Copy {
    folder: TempDir,
}

impl Copy {
    fn new() -> Copy {
        let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/spec7.mlpackage");
        let copy = Copy { folder: tempfile::tempdir().unwrap() };
        fs::create_dir_all(copy.path("Data/com.apple.CoreML/weights")).unwrap();
        for file in ["Manifest.json", MODEL, WEIGHTS] {
            fs::copy(from.join(file), copy.path(file)).unwrap();
        }
        copy
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("m.mlpackage")
    }

    fn path(&self, file: &str) -> PathBuf {
        self.root().join(file)
    }

    /// Replaces the model's path in the manifest.
    fn model_path(&self, path: &str) {
        let text = fs::read_to_string(self.path("Manifest.json")).unwrap();
        let replaced = text.replace("com.apple.CoreML/model.mlmodel", path);
        assert_ne!(text, replaced, "the manifest names the model");
        fs::write(self.path("Manifest.json"), replaced).unwrap();
    }

    /// Replaces the weight file's name in the program by one of the same length.
    fn weight_name(&self, name: &str) {
        let written = b"@model_path/weights/weight.bin";
        assert_eq!(name.len(), written.len());
        let mut model = fs::read(self.path(MODEL)).unwrap();
        let mut found = false;
        for at in 0..model.len() - written.len() {
            if model[at..].starts_with(written) {
                model[at..][..name.len()].copy_from_slice(name.as_bytes());
                found = true;
            }
        }
        assert!(found, "the program names its weight file");
        fs::write(self.path(MODEL), model).unwrap();
    }

    fn refusal(&self) -> MilError {
        Package::open(&self.root()).expect_err("the package is broken")
    }
}

fn reason(error: &MilError) -> String {
    match error {
        MilError::PathLeavesPackage { reason, .. } | MilError::NotAPackage { reason, .. } => {
            (*reason).to_owned()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_unspoilt_copy_opens() {
    let package = Package::open(&Copy::new().root()).unwrap();
    assert_eq!(package.specification_version(), 7);
}

#[test]
fn a_path_that_does_not_exist_is_refused() {
    let error = Package::open(Path::new("/nowhere/m.mlpackage")).unwrap_err();
    assert_eq!(error.to_string(), "`/nowhere/m.mlpackage` is not an .mlpackage: it does not exist");
}

#[test]
fn a_file_is_refused() {
    let copy = Copy::new();
    assert_eq!(reason(&Package::open(&copy.path(MODEL)).unwrap_err()), "it is not a folder");
}

#[test]
fn a_folder_without_a_manifest_is_refused() {
    let copy = Copy::new();
    fs::remove_file(copy.path("Manifest.json")).unwrap();
    assert_eq!(reason(&copy.refusal()), "it has no Manifest.json");
}

#[test]
fn a_manifest_that_is_no_json_is_refused() {
    let copy = Copy::new();
    fs::write(copy.path("Manifest.json"), "{").unwrap();
    assert!(copy.refusal().to_string().starts_with("broken Manifest.json: EOF while parsing"));
}

#[test]
fn a_manifest_of_another_version_is_refused() {
    for version in ["2.0.0", "10.0.0", "", "one"] {
        let text = format!(
            r#"{{"fileFormatVersion": "{version}", "rootModelIdentifier": "A", "itemInfoEntries": {{}}}}"#
        );
        let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, format!("broken Manifest.json: format version `{version}` is not 1"));
    }
}

#[test]
fn a_manifest_without_a_root_model_is_refused() {
    let text = r#"{"fileFormatVersion": "1.0.0", "itemInfoEntries": {}}"#;
    let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
    assert!(error.contains("missing field `rootModelIdentifier`"), "{error}");
}

#[test]
fn a_root_model_that_is_no_item_is_refused() {
    let text = r#"{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "A", "itemInfoEntries":
                   {"B": {"path": "com.apple.CoreML/model.mlmodel"}}}"#;
    let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(error, "broken Manifest.json: the root model `A` is not among its 1 items");
}

#[test]
fn items_that_are_no_items_are_refused() {
    for (items, problem) in [("[]", "invalid type: sequence"), (r#"{"A": {}}"#, "missing field `path`")] {
        let text = format!(
            r#"{{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "A", "itemInfoEntries": {items}}}"#
        );
        let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("broken Manifest.json: {problem}")), "{error}");
    }
}

#[test]
fn a_manifest_of_megabytes_is_refused_before_it_is_read() {
    let copy = Copy::new();
    fs::File::create(copy.path("Manifest.json")).unwrap().set_len((1 << 20) + 1).unwrap();
    assert_eq!(copy.refusal().to_string(), "broken Manifest.json: it has more than 1048576 bytes");
}

#[test]
fn a_folder_in_a_files_place_is_refused_by_name() {
    for file in [MODEL, WEIGHTS] {
        let copy = Copy::new();
        fs::remove_file(copy.path(file)).unwrap();
        fs::create_dir(copy.path(file)).unwrap();
        let (error, name) = (copy.refusal().to_string(), Path::new(file).file_name().unwrap());
        assert!(error.contains(name.to_str().unwrap()), "{error}");
    }
}

#[test]
fn an_empty_weight_file_is_refused_with_the_constant_that_needs_it() {
    let copy = Copy::new();
    fs::write(copy.path(WEIGHTS), "").unwrap();
    let error = copy.refusal().to_string();
    assert!(error.starts_with("function `main`, op `const`, output `"), "{error}");
    assert!(error.ends_with("the file has 0 bytes; a weight file has a header of 64"), "{error}");
}

#[test]
fn a_missing_model_file_is_refused() {
    let copy = Copy::new();
    fs::remove_file(copy.path(MODEL)).unwrap();
    let error = copy.refusal().to_string();
    assert!(error.starts_with("cannot read `") && error.contains("model.mlmodel"), "{error}");
}

#[test]
fn a_model_path_that_climbs_is_refused() {
    let copy = Copy::new();
    copy.model_path("com.apple.CoreML/../../../model.mlmodel");
    assert_eq!(reason(&copy.refusal()), "it has a `..`");
}

#[test]
fn an_absolute_model_path_is_refused() {
    let copy = Copy::new();
    copy.model_path("/etc/hostname");
    assert_eq!(reason(&copy.refusal()), "it is absolute");
}

#[test]
fn an_empty_model_path_is_refused() {
    let copy = Copy::new();
    copy.model_path("");
    assert_eq!(reason(&copy.refusal()), "it is empty");
}

#[test]
fn a_missing_weight_file_is_refused_with_the_constant_that_needs_it() {
    let copy = Copy::new();
    fs::remove_file(copy.path(WEIGHTS)).unwrap();
    let error = copy.refusal().to_string();
    assert!(error.starts_with("function `main`, op `const`, output `"), "{error}");
    assert!(error.ends_with("of `@model_path/weights/weight.bin`: the file does not exist"), "{error}");
}

#[test]
fn a_weight_name_that_climbs_is_refused() {
    let copy = Copy::new();
    copy.weight_name("@model_path/../../../weight.bi");
    assert_eq!(reason(&copy.refusal()), "it has a `..`");
}

#[test]
fn an_absolute_weight_name_is_refused() {
    let copy = Copy::new();
    copy.weight_name("@model_path//etc/ssh/ssh_confi");
    assert_eq!(reason(&copy.refusal()), "it is absolute");
}

#[test]
fn a_weight_name_without_the_model_path_is_refused() {
    let copy = Copy::new();
    copy.weight_name("model_path/../weights/weight.b");
    assert_eq!(reason(&copy.refusal()), "it does not start with `@model_path/`");
}

#[cfg(unix)]
mod links {
    use std::os::unix::fs::symlink;

    use super::*;

    fn moved_out(copy: &Copy, file: &str) {
        let outside = copy.folder.path().join("outside");
        fs::rename(copy.path(file), &outside).unwrap();
        symlink(&outside, copy.path(file)).unwrap();
        assert_eq!(reason(&copy.refusal()), "a symbolic link leads out", "{file}");
    }

    #[test]
    fn a_link_out_of_the_package_is_refused() {
        for file in ["Manifest.json", MODEL, WEIGHTS] {
            moved_out(&Copy::new(), file);
        }
    }

    #[test]
    fn a_linked_folder_out_of_the_package_is_refused() {
        moved_out(&Copy::new(), "Data/com.apple.CoreML/weights");
        moved_out(&Copy::new(), "Data");
    }

    #[test]
    fn a_link_within_the_package_is_followed() {
        let copy = Copy::new();
        fs::rename(copy.path(WEIGHTS), copy.path("Data/shared.bin")).unwrap();
        symlink(copy.path("Data/shared.bin"), copy.path(WEIGHTS)).unwrap();
        assert!(Package::open(&copy.root()).is_ok());
    }

    #[test]
    fn the_package_itself_may_be_a_link() {
        let copy = Copy::new();
        let link = copy.folder.path().join("link.mlpackage");
        symlink(copy.root(), &link).unwrap();
        assert_eq!(Package::open(&link).unwrap().path(), link);
    }
}
