// Package excerpt copies the needed fields of an encoded protobuf message, and drops all others,
// before anything is decoded. Messages of other projects' protocols state no limits of their own,
// and two bytes on the wire can become a thousand in memory: an empty Container of a Pod does.
package excerpt

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// Fields are the needed fields of a message, by number. All of them must be length-delimited:
// strings, bytes, messages, and the entries of maps. Fields of other types that have an entry are
// dropped.
type Fields map[protowire.Number]Field

// Field is a needed field.
type Field struct {
	// Name is the field's name, for errors.
	Name string
	// Most is the maximum number of values, in each message that has the field. 0 means no limit.
	Most int
	// Inside are the needed fields of each value, which is a message. If nil, values are copied as
	// they are.
	Inside Fields
	// Check, if set, is called with each value that is copied as it is. Its error ends the copy.
	Check func(value []byte) error
}

// ErrMalformed means that the bytes are no message.
var ErrMalformed = errors.New("it is not an encoded message")

// FieldError means that a field has too many values, or one that its check rejects.
type FieldError struct{ Field, Message string }

func (e *FieldError) Error() string { return e.Field + ": " + e.Message }

// Of returns the encoded message with its needed fields. It allocates at most three times as much
// as the message has bytes, whatever it contains. Errors: [ErrMalformed], [*FieldError].
func Of(encoded []byte, fields Fields) ([]byte, error) {
	var (
		excerpt []byte
		seen    map[protowire.Number]int
	)
	for len(encoded) > 0 {
		number, kind, length := protowire.ConsumeTag(encoded)
		if length < 0 {
			return nil, ErrMalformed
		}
		encoded = encoded[length:]
		field, needed := fields[number]
		if !needed || kind != protowire.BytesType {
			if length = protowire.ConsumeFieldValue(number, kind, encoded); length < 0 {
				return nil, ErrMalformed
			}
			encoded = encoded[length:]
			continue
		}
		value, length := protowire.ConsumeBytes(encoded)
		if length < 0 {
			return nil, ErrMalformed
		}
		encoded = encoded[length:]
		if seen == nil {
			seen = map[protowire.Number]int{}
		}
		if seen[number]++; field.Most > 0 && seen[number] > field.Most {
			return nil, &FieldError{Field: field.Name, Message: fmt.Sprintf("must have at most %d elements", field.Most)}
		}
		value, err := field.needed(value)
		if err != nil {
			return nil, err
		}
		excerpt = protowire.AppendTag(excerpt, number, protowire.BytesType)
		excerpt = protowire.AppendBytes(excerpt, value)
	}
	return excerpt, nil
}

// needed returns what is needed of a value.
func (f Field) needed(value []byte) ([]byte, error) {
	if f.Inside == nil {
		if f.Check == nil {
			return value, nil
		}
		if err := f.Check(value); err != nil {
			return nil, &FieldError{Field: f.Name, Message: err.Error()}
		}
		return value, nil
	}
	inside, err := Of(value, f.Inside)
	if of, ok := errors.AsType[*FieldError](err); ok {
		return nil, &FieldError{Field: f.Name + "." + of.Field, Message: of.Message}
	}
	return inside, err
}
