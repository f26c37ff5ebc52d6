// Command protoc-gen-api-docs is a protoc plugin that writes one Markdown page, api.md, about all
// the files it is asked to generate: each service and RPC with its comment, each message with its
// fields and their constraints, each enum.
//
// Comments are taken as Markdown, as they are. The generators that exist do not show
// protovalidate's constraints.
package main

import (
	"fmt"
	"slices"
	"strings"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/pluginpb"
)

const page = "api.md"

func main() {
	protogen.Options{}.Run(func(plugin *protogen.Plugin) error {
		plugin.SupportedFeatures = uint64(pluginpb.CodeGeneratorResponse_FEATURE_PROTO3_OPTIONAL)
		files := slices.DeleteFunc(slices.Clone(plugin.Files), func(f *protogen.File) bool { return !f.Generate })
		if len(files) == 0 {
			return nil
		}
		slices.SortFunc(files, func(a, b *protogen.File) int { return strings.Compare(a.Desc.Path(), b.Desc.Path()) })
		out := &writer{GeneratedFile: plugin.NewGeneratedFile(page, ""), local: files[0].Desc.Package()}
		out.write(files)
		return nil
	})
}

// writer writes the page. Types of the package local are links into the page, by their short name.
type writer struct {
	*protogen.GeneratedFile

	local protoreflect.FullName
}

func (w *writer) write(files []*protogen.File) {
	w.P("<!-- Generated from the .proto files by protoc-gen-api-docs. DO NOT EDIT. -->")
	w.P("# API reference: `", w.local, "`")
	w.P()
	w.P("The services, then the messages and the enums, in the order of the `.proto` files. A constraint is checked by the")
	w.P("agent before anything else; a message that breaks one is answered with `INVALID_ARGUMENT` and the field's name.")
	w.P()
	for _, file := range files {
		for _, service := range file.Services {
			w.P("- [", service.Desc.Name(), "](#", anchor(service.Desc.Name()), ")")
			for _, method := range service.Methods {
				w.P("  - [", method.Desc.Name(), "](#", anchor(method.Desc.Name()), ")")
			}
		}
	}
	for _, file := range files {
		for _, service := range file.Services {
			w.service(service)
		}
	}
	w.P()
	w.P("## Messages")
	for _, file := range files {
		for _, message := range file.Messages {
			w.message(message)
		}
	}
	w.P()
	w.P("## Enums")
	for _, file := range files {
		for _, enum := range file.Enums {
			w.enum(enum)
		}
	}
}

func (w *writer) service(service *protogen.Service) {
	w.P()
	w.P("## ", service.Desc.Name())
	w.P()
	w.P("`", service.Desc.FullName(), "`")
	w.paragraphs(service.Comments.Leading)
	for _, method := range service.Methods {
		w.P()
		w.P("### ", method.Desc.Name())
		w.P()
		w.P(stream(method.Desc.IsStreamingClient()), w.link(method.Input.Desc), " → ",
			stream(method.Desc.IsStreamingServer()), w.link(method.Output.Desc))
		w.paragraphs(method.Comments.Leading)
	}
}

func (w *writer) message(message *protogen.Message) {
	if message.Desc.IsMapEntry() {
		return
	}
	w.P()
	w.P("### ", w.shortName(message.Desc))
	w.paragraphs(message.Comments.Leading)
	if len(message.Fields) > 0 {
		w.P()
		w.P("| field | type | description |")
		w.P("|---|---|---|")
	}
	for _, field := range message.Fields {
		w.P("| `", field.Desc.Name(), "` | ", w.fieldType(field), " | ", cell(field), " |")
	}
	for _, nested := range message.Messages {
		w.message(nested)
	}
	for _, nested := range message.Enums {
		w.enum(nested)
	}
}

func (w *writer) enum(enum *protogen.Enum) {
	w.P()
	w.P("### ", w.shortName(enum.Desc))
	w.paragraphs(enum.Comments.Leading)
	w.P()
	w.P("| value | number | meaning |")
	w.P("|---|---|---|")
	for _, value := range enum.Values {
		w.P("| `", value.Desc.Name(), "` | ", value.Desc.Number(), " | ", inline(value.Comments.Leading), " |")
	}
}

// paragraphs writes a comment as it is, after an empty line.
func (w *writer) paragraphs(comment protogen.Comments) {
	if comment == "" {
		return
	}
	w.P()
	for line := range strings.Lines(string(comment)) {
		w.P(strings.TrimRight(strings.TrimPrefix(line, " "), "\n"))
	}
}

func (w *writer) fieldType(field *protogen.Field) string {
	desc := field.Desc
	switch {
	case desc.IsMap():
		return fmt.Sprintf("map of %s to %s", desc.MapKey().Kind(), w.valueType(desc.MapValue()))
	case desc.IsList():
		return "list of " + w.valueType(desc)
	case desc.HasOptionalKeyword():
		return "optional " + w.valueType(desc)
	case desc.ContainingOneof() != nil:
		return fmt.Sprintf("%s (one of `%s`)", w.valueType(desc), desc.ContainingOneof().Name())
	default:
		return w.valueType(desc)
	}
}

func (w *writer) valueType(desc protoreflect.FieldDescriptor) string {
	switch {
	case desc.Message() != nil:
		return w.link(desc.Message())
	case desc.Enum() != nil:
		return w.link(desc.Enum())
	default:
		return desc.Kind().String()
	}
}

func (w *writer) link(desc protoreflect.Descriptor) string {
	if desc.ParentFile().Package() != w.local {
		return fmt.Sprintf("`%s`", desc.FullName())
	}
	return fmt.Sprintf("[%s](#%s)", w.shortName(desc), anchor(protoreflect.Name(w.shortName(desc))))
}

func (w *writer) shortName(desc protoreflect.Descriptor) string {
	return strings.TrimPrefix(string(desc.FullName()), string(w.local)+".")
}

// cell is a field's comment and its constraints, on one line.
func cell(field *protogen.Field) string {
	text := inline(field.Comments.Leading)
	rules, ok := proto.GetExtension(field.Desc.Options(), validate.E_Field).(*validate.FieldRules)
	if !ok || rules == nil {
		return text
	}
	constraints := constraints("", rules.ProtoReflect())
	if len(constraints) == 0 {
		return text
	}
	return text + " Constraints: " + strings.Join(constraints, ", ") + "."
}

// constraints are the rules that are set, each as "`path` = `value`", in the order in which
// protovalidate declares them.
func constraints(prefix string, rules protoreflect.Message) []string {
	var found []string
	fields := rules.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if !rules.Has(field) {
			continue
		}
		path, value := prefix+string(field.Name()), rules.Get(field)
		switch {
		case field.IsList():
			list := value.List()
			for j := range list.Len() {
				found = append(found, fmt.Sprintf("`%s = %v`", path, list.Get(j)))
			}
		case field.Message() != nil:
			found = append(found, constraints(path+".", value.Message())...)
		case field.Kind() == protoreflect.BoolKind:
			found = append(found, "`"+path+"`")
		default:
			found = append(found, fmt.Sprintf("`%s = %s`", path, strings.ReplaceAll(value.String(), "|", `\|`)))
		}
	}
	return found
}

// inline is a comment on one line, safe in a table.
func inline(comment protogen.Comments) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(string(comment)), " "), "|", `\|`)
}

func stream(is bool) string {
	if is {
		return "stream of "
	}
	return ""
}

// anchor is the id that a Markdown renderer gives to the heading of that name.
func anchor(name protoreflect.Name) string {
	return strings.ToLower(strings.ReplaceAll(string(name), ".", ""))
}
