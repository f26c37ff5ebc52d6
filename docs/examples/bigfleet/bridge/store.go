package bridge

import (
	"errors"
	"fmt"
	"time"

	"go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
)

// maxName bounds the parts of the key of a mark.
const maxName = 1024

var (
	slotBucket = []byte("slots") // by machine ID
	markBucket = []byte("marks") // by shard and machine ID
)

// request is what the calls that begin a transition have in common.
type request interface {
	GetId() string
	GetShard() string
	GetEpoch() int64
	GetSequence() int64
}

// store is the state file. What it has saved survives a crash.
type store struct{ db *bbolt.DB }

func openStore(path string) (*store, error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, slots := tx.CreateBucketIfNotExists(slotBucket)
		_, marks := tx.CreateBucketIfNotExists(markBucket)
		return errors.Join(slots, marks)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening %s: %w", path, err), db.Close())
	}
	return &store{db: db}, nil
}

func (s *store) close() error { return s.db.Close() }

func (s *store) slots() (map[string]*protocol.Slot, error) {
	slots := map[string]*protocol.Slot{}
	return slots, s.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(slotBucket).ForEach(func(id, value []byte) error {
			slot := &protocol.Slot{}
			slots[string(id)] = slot
			return proto.Unmarshal(value, slot)
		})
	})
}

func (s *store) save(slots []*protocol.Slot, gone []string) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(slotBucket)
		for _, slot := range slots {
			value, err := proto.Marshal(slot)
			if err != nil {
				return err
			}
			if err := bucket.Put([]byte(slot.GetMachine().GetId()), value); err != nil {
				return err
			}
		}
		for _, id := range gone {
			if err := bucket.Delete([]byte(id)); err != nil {
				return err
			}
		}
		return nil
	})
}

// pass returns FAILED_PRECONDITION unless the request's token is newer than every other that the shard has used for the machine. A
// request without a token always passes.
func (s *store) pass(r request) error {
	token := &protocol.Mark{Epoch: r.GetEpoch(), Sequence: r.GetSequence()}
	if r.GetShard() == "" && token.GetEpoch() == 0 && token.GetSequence() == 0 {
		return nil
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		bucket, key, last := tx.Bucket(markBucket), fmt.Appendf(nil, "%q %q", r.GetShard(), r.GetId()), &protocol.Mark{}
		if value := bucket.Get(key); value != nil {
			if err := proto.Unmarshal(value, last); err != nil {
				return err
			}
			if token.GetEpoch() < last.GetEpoch() || token.GetEpoch() == last.GetEpoch() && token.GetSequence() <= last.GetSequence() {
				return status.Errorf(codes.FailedPrecondition, "shard %q has used token (%d, %d) for machine %q, and (%d, %d) is not newer",
					r.GetShard(), last.GetEpoch(), last.GetSequence(), r.GetId(), token.GetEpoch(), token.GetSequence())
			}
		}
		value, err := proto.Marshal(token)
		if err != nil {
			return err
		}
		return bucket.Put(key, value)
	})
}
