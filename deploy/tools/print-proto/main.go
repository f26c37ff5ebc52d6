// Command print-proto writes the .proto source of the protovalidate rules, printed from the
// descriptor that their Go module carries, below the folder given as its argument. The buf CLI
// needs that source to resolve `import "buf/validate/validate.proto"`, and this way it comes from
// the pinned Go module instead of a schema registry.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"github.com/jhump/protoreflect/v2/protoprint"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: print-proto <folder>")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "print-proto:", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	file := validate.File_buf_validate_validate_proto
	source, err := (&protoprint.Printer{}).PrintProtoToString(file)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, file.Path())
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte("// Printed from the protovalidate Go module's descriptor by print-proto. DO NOT EDIT.\n\n"+source), 0o644)
}
