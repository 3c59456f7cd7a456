//! Machines that routes can be planned for: shipped, calibrated, or the user's own files.

use std::path::{Path, PathBuf};

use kvbaton_plan::route::{Machine, Origin};

use crate::work::built_in_work;
use crate::{Error, ErrorKind};

/// Figures that others published, by the machine's name.
const SHIPPED: [(&str, &str); 4] = [
    ("m1-max", include_str!("m1-max.toml")),
    ("m2-ultra", include_str!("m2-ultra.toml")),
    ("m4", include_str!("m4.toml")),
    ("m5-pro", include_str!("m5-pro.toml")),
];

/// The names of the machines that ship with kvbaton. None of their figures was measured by it.
pub fn shipped_machines() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// Reads a machine from TOML; `file` is for messages.
///
/// # Errors
///
/// When it is no such TOML, or a figure makes no sense.
pub fn read_machine(text: &str, file: &str) -> Result<Machine, Error> {
    let wrong =
        |e: String| Error::new(ErrorKind::Usage, format!("machine file `{file}`: {e}")).field("file", file);
    let mut machine: Machine = toml::from_str(text).map_err(|e| wrong(one_line(&e)))?;
    machine.check(built_in_work).map_err(|e| wrong(e.to_string()))?;
    Ok(machine)
}

fn one_line(error: &toml::de::Error) -> String {
    error.to_string().lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A machine by the name of a shipped one or by a file.
///
/// # Errors
///
/// When there is no such machine, or it cannot be read.
pub fn machine(name: &str) -> Result<Machine, Error> {
    if let Some((name, text)) = SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
        return read_machine(text, name);
    }
    let path = Path::new(name);
    let text = std::fs::read_to_string(path).map_err(|e| {
        let known = shipped_machines().collect::<Vec<_>>().join(", ");
        Error::new(ErrorKind::Usage, format!("no machine `{name}`: {e}"))
            .hint(format!("shipped: {known}; or measure this one with `kvbaton calibrate`"))
            .field("machine", name)
    })?;
    read_machine(&text, name)
}

/// The machine that this is: what `kvbaton calibrate` measured here, or else the shipped one of this chip.
///
/// # Errors
///
/// When there is neither, or the file cannot be read.
pub fn this_machine(chip: &str) -> Result<Machine, Error> {
    if let Some(file) = calibrated_file().filter(|f| f.exists()) {
        return machine(&file.display().to_string());
    }
    for (name, text) in SHIPPED {
        let machine = read_machine(text, name)?;
        if machine.chips.iter().any(|c| c == chip) {
            return Ok(machine);
        }
    }
    Err(Error::new(ErrorKind::Usage, format!("nothing is known of this machine ({chip})"))
        .hint("run `kvbaton calibrate --decode MODEL --prefill PACKAGE`, or name a machine with --machine")
        .field("chip", chip))
}

/// Where `kvbaton calibrate` keeps its file: `machine.toml` in `$XDG_CONFIG_HOME/kvbaton`,
/// `~/Library/Application Support/kvbaton` on macOS, else `~/.config/kvbaton`.
pub fn calibrated_file() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let home = variable("HOME").map(|h| {
        if cfg!(target_os = "macos") { h.join("Library/Application Support") } else { h.join(".config") }
    });
    Some(variable("XDG_CONFIG_HOME").or(home)?.join("kvbaton/machine.toml"))
}

/// Writes a machine, aside and renamed. Figures of the same model, engine and length that the file had are replaced,
/// others stay.
///
/// # Errors
///
/// When the file there is no machine file of measured figures, or cannot be written.
pub fn write_machine(mut machine: Machine, file: &Path) -> Result<Machine, Error> {
    let io = |e: std::io::Error| Error::new(ErrorKind::Io, format!("cannot write `{}`: {e}", file.display()));
    if let Some(old) = kept_machine(file)?.filter(|old| old.name == machine.name) {
        merge(&mut machine, old);
    }
    let text = toml::to_string(&machine).map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))?;
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(io)?;
    let mut aside = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
    std::io::Write::write_all(&mut aside, text.as_bytes()).map_err(io)?;
    aside.persist(file).map_err(|e| io(e.error))?;
    Ok(machine)
}

/// The measured figures that a file holds already; `None` where there is no file.
///
/// # Errors
///
/// When what is there is no machine file of measured figures.
pub fn kept_machine(file: &Path) -> Result<Option<Machine>, Error> {
    if !file.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(file)
        .map_err(|e| Error::new(ErrorKind::Usage, format!("cannot read `{}`: {e}", file.display())))?;
    let old = read_machine(&text, &file.display().to_string())?;
    if old.origin != Origin::Measured {
        let message = format!("`{}` holds published figures: measured ones are not mixed in", file.display());
        return Err(Error::new(ErrorKind::Usage, message).hint("name another file with --out"));
    }
    Ok(Some(old))
}

/// Adds the figures of `old` that `new` has none of its kind for.
fn merge(new: &mut Machine, old: Machine) {
    for (name, work) in old.models {
        new.models.entry(name).or_insert(work);
    }
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for f in old.prefill {
        let same = |n: &&kvbaton_plan::route::PrefillFigure| {
            (n.engine, &n.model, &n.dtype) == (f.engine, &f.model, &f.dtype)
        };
        if !new.prefill.iter().any(|n| same(&n)) {
            prefill.push(f);
        }
    }
    for f in old.decode {
        let same = |n: &&kvbaton_plan::route::DecodeFigure| {
            (n.engine, &n.model, &n.dtype) == (f.engine, &f.model, &f.dtype)
        };
        if !new.decode.iter().any(|n| same(&n)) {
            decode.push(f);
        }
    }
    new.prefill.extend(prefill);
    new.decode.extend(decode);
    if new.handoff.is_empty() {
        new.handoff = old.handoff;
    }
    if new.power.is_empty() {
        new.power = old.power;
    }
}

#[cfg(test)]
mod tests {
    use kvbaton_plan::route::{Engine, PrefillFigure};

    use super::*;

    #[test]
    fn shipped_machines_are_sound_and_say_that_they_were_not_measured() {
        for name in shipped_machines() {
            let machine = machine(name).unwrap();
            assert_eq!((machine.name.as_str(), machine.origin), (name, Origin::Published));
            assert!(machine.note.unwrap().contains("Not measured by kvbaton"), "{name}");
            assert!(!machine.chips.is_empty(), "{name}");
        }
    }

    fn measured(seconds: f64, model: &str) -> Machine {
        let mut machine = machine("m5-pro").unwrap();
        machine.origin = Origin::Measured;
        machine.prefill = vec![PrefillFigure {
            engine: Engine::Mlx,
            model: model.to_owned(),
            dtype: "float16".to_owned(),
            tokens: 512,
            seconds,
            source: None,
        }];
        machine.decode.clear();
        machine
    }

    #[test]
    fn a_second_calibration_replaces_what_it_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep/machine.toml");
        write_machine(measured(1.0, "qwen3-4b"), &file).unwrap();
        write_machine(measured(2.0, "qwen3-0.6b"), &file).unwrap();
        write_machine(measured(3.0, "qwen3-4b"), &file).unwrap();
        let kept = machine(&file.display().to_string()).unwrap();
        let seconds =
            |model: &str| kept.prefill.iter().filter(|f| f.model == model).map(|f| f.seconds).sum::<f64>();
        assert_eq!((seconds("qwen3-4b"), seconds("qwen3-0.6b")), (3.0, 2.0));
        assert_eq!(std::fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn published_figures_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.toml");
        std::fs::write(&file, SHIPPED[0].1).unwrap();
        let error = write_machine(measured(1.0, "qwen3-4b"), &file).unwrap_err();
        assert!(error.to_string().contains("published"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), SHIPPED[0].1);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_in_a_line() {
        let text = SHIPPED[3].1;
        for (from, to, words) in [
            ("seconds = 1.153", "seconds = -1", "prefill[0].seconds"),
            ("seconds = 1.153", "seconds = \"fast\"", "invalid type"),
            ("engine = \"coreml\"", "engine = \"tpu\"", "tpu"),
            ("[warm_copy]", "[warm_cpy]", "warm_cpy"),
            ("model = \"qwen3-4b\"", "model = \"gpt-9\"", "`gpt-9`"),
            ("origin = \"published\"", "origin = \"rumoured\"", "rumoured"),
        ] {
            let error = read_machine(&text.replace(from, to), "x.toml").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(words), "{error}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        assert_eq!(machine("m99").unwrap_err().kind(), ErrorKind::Usage);
    }
}
