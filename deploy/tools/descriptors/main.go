// Command descriptors completes a descriptor set for clients that have no generated code. It adds
// the messages that the details of the API's errors consist of, google.rpc.Status and its like: no
// method names them, so they are not among the imports of the protos.
package main

import (
	"fmt"
	"os"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: descriptors <descriptor set to read> <descriptor set to write>")
		os.Exit(2)
	}
	if err := complete(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "descriptors:", err)
		os.Exit(1)
	}
}

func complete(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	set := &descriptorpb.FileDescriptorSet{}
	if err := proto.Unmarshal(content, set); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	present := map[string]bool{}
	for _, file := range set.GetFile() {
		present[file.GetName()] = true
	}
	add(set, present, statuspb.File_google_rpc_status_proto)
	add(set, present, errdetails.File_google_rpc_error_details_proto)
	if content, err = (proto.MarshalOptions{Deterministic: true}).Marshal(set); err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o644)
}

// add adds the file after its imports, as readers of a set expect, unless the set has it.
func add(set *descriptorpb.FileDescriptorSet, present map[string]bool, file protoreflect.FileDescriptor) {
	if present[file.Path()] {
		return
	}
	present[file.Path()] = true
	for i := range file.Imports().Len() {
		add(set, present, file.Imports().Get(i).FileDescriptor)
	}
	set.File = append(set.File, protodesc.ToFileDescriptorProto(file))
}
