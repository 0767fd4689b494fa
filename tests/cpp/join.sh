# For the scripts beside it, which compile the layers below torch.

# join <unit> <source>...: writes the file that includes the sources, unless it is there. One unit of several sources
# compiles sooner, because the standard headers take most of the time.
join() {
  local text
  text=$(printf '#include "%s"\n' "${@:2}")
  mkdir -p "$(dirname "$1")"
  [ "$(cat "$1" 2>/dev/null)" = "$text" ] || echo "$text" >"$1"
}
